"""Translates the messages about new weights: to workers, from workers, from and to operators.

Owns no state. WireError names the fault.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2
from tandem.v1 import control_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.effects import LoadWeights, WeightsSpan
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights, WeightsLoaded, WeightsRestored
from scheduler_svc.core.messages.reports import UpdateState, WeightsReport
from scheduler_svc.wire.arrays import WireError, fields

MAX_VERSION_CHARS = 128
MAX_FOLDER_CHARS = 4096
MAX_UPDATE_SECONDS = 86_400
DEFAULT_UPDATE_SECONDS = 600.0
_MAX_DETAIL = 2000

_RUNNING = {control_pb2.RunningRequests.Value(f"RUNNING_REQUESTS_{each.name}"): each for each in Running}
_STATE = {state: control_pb2.UpdateState.Value(f"UPDATE_STATE_{state.name}") for state in UpdateState}
_PROGRESS = tuple(name for name in control_pb2.UpdateWeightsResponse.DESCRIPTOR.fields_by_name if name != "state")


def _weights(version: str, folder: str) -> Weights:
    for name, text, most in (("version", version, MAX_VERSION_CHARS), ("folder", folder, MAX_FOLDER_CHARS)):
        if not 1 <= len(text) <= most:
            raise WireError(f"{name} has {len(text)} characters; it must have 1 to {most}")
    return Weights(version=version, folder=folder)


def update_of(message: frontend_pb2.UpdateWeights, frontend: str) -> UpdateWeights:
    """Returns the core's event. Raises WireError."""
    request = message.request
    if message.stop_replies:
        none = Weights(version="", folder="")
        return UpdateWeights(frontend=frontend, query=message.query, weights=none, stop_replies=True)
    # Also false for NaN.
    if not 0 <= request.max_seconds <= MAX_UPDATE_SECONDS:
        raise WireError(f"max_seconds is {request.max_seconds:g}; it must be between 0 and {MAX_UPDATE_SECONDS}")
    running = _RUNNING.get(request.running or control_pb2.RUNNING_REQUESTS_RECOMPUTE)
    if running is None:
        raise WireError(f"running is {request.running}, which is unknown")
    return UpdateWeights(
        frontend=frontend,
        query=message.query,
        weights=_weights(request.version, request.folder),
        running=running,
        in_turn=request.in_turn,
        max_seconds=request.max_seconds or DEFAULT_UPDATE_SECONDS,
    )


def fill_reply(
    out: frontend_pb2.UpdateWeightsReply,
    effect: WeightsReport | fx.UpdateRefused,
    codes: Mapping[fx.RejectCode, Any],
) -> None:
    """Fills an empty reply. `codes` has the numbers of refusals."""
    out.query = effect.query
    if isinstance(effect, fx.UpdateRefused):
        out.refusal, out.message, out.field = codes[effect.code], effect.message, effect.field
    else:
        out.progress.MergeFrom(
            control_pb2.UpdateWeightsResponse(state=_STATE[effect.state], **fields(effect, _PROGRESS))
        )


def load_frame(effect: LoadWeights) -> bytes:
    """Encodes the order to load weights."""
    order = worker_pb2.LoadWeights(
        version=effect.weights.version, folder=effect.weights.folder, roots=effect.roots, keep_rows=effect.keep_rows
    )
    return worker_pb2.CoreToWorker(load_weights=order).SerializeToString()


def loaded_of(message: worker_pb2.WeightsLoaded, worker: str) -> WeightsLoaded:
    """Returns the core's event."""
    return WeightsLoaded(
        worker=worker,
        version=message.version[:MAX_VERSION_CHARS],
        ok=message.ok,
        detail=message.detail[:_MAX_DETAIL],
    )


def check_join(join: worker_pb2.Join) -> None:
    """Raises WireError if a Join names a version without a folder, or one that is too long."""
    if join.weights_version or join.weights_folder:
        _weights(join.weights_version, join.weights_folder)


def restored_of(entry: record_pb2.WeightsRestored) -> WeightsRestored:
    """Returns the core's event. Raises WireError."""
    return WeightsRestored(weights=_weights(entry.version, entry.folder))


def fill_spans(out: Any, spans: Iterable[WeightsSpan]) -> None:
    """Adds the spans to a repeated field."""
    for span in spans:
        out.add(from_token=span.from_token, version=span.version)


def spans_of(messages: Iterable[Any]) -> tuple[WeightsSpan, ...]:
    """Returns the spans of a repeated field."""
    return tuple(WeightsSpan(from_token=each.from_token, version=each.version) for each in messages)
