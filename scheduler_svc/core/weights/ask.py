"""Decides whether an update of weights may begin: the folder, the version, other updates. The functions are pure."""

from collections.abc import Container, Sequence

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.operators import UpdateWeights, Weights


def refusal_of(
    event: UpdateWeights,
    *,
    roots: Sequence[str],
    going_on: Weights | None,
    used: Container[str],
    has_workers: bool,
) -> fx.UpdateRefused | None:
    """Returns why the update does not begin, or None. `used` has the versions of earlier updates."""
    weights = event.weights

    def refused(code: fx.RejectCode, message: str, field: str = "") -> fx.UpdateRefused:
        return fx.UpdateRefused(frontend=event.frontend, query=event.query, code=code, message=message, field=field)

    if not roots:
        message = "updates of weights are off; start the service with --weights-folders FOLDER"
        return refused(fx.RejectCode.NOT_FOUND, message)
    if why := why_not_allowed(weights.folder, roots):
        return refused(fx.RejectCode.INVALID, f"folder: {why}", "folder")
    if going_on is not None:
        message = f"the update to version {going_on.version!r} goes on; another one may begin when it has ended"
        return refused(fx.RejectCode.DUPLICATE, message)
    if weights.version in used:
        message = f"version: {weights.version!r} was used before; a version names the same weights for ever"
        return refused(fx.RejectCode.INVALID, message, "version")
    if not has_workers:
        return refused(fx.RejectCode.NOT_READY, "no worker has joined; an update needs one that checks the folder")
    return None


def why_not_allowed(folder: str, roots: Sequence[str]) -> str:
    """Returns why workers may not load from this path, or an empty string. The worker resolves symbolic links."""
    if not folder.startswith("/") or ".." in folder.split("/") or "\0" in folder:
        return f"{folder!r} must be an absolute path without '..'"
    if not any(f"{folder}/".startswith(f"{root.rstrip('/')}/") for root in roots):
        return f"{folder!r} is not in one of the folders of --weights-folders: {', '.join(roots)}"
    return ""
