"""The version of Tandem, for `--version` and for programs, and how what it leaves out by default is installed.

Owns the search for both. Reads no file at import.
"""

import re
import tomllib
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "tandem-inference"
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def version() -> str:
    """Returns the version of the installed distribution, else of the checkout of this file, else "unknown"."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return _checkout_version(_PROJECT) or "unknown"


def how_to_install(extra: str) -> str:
    """Returns a command for the requirements of an extra of `pyproject.toml`, which works in every folder.

    It does not name Tandem itself: a package of that name in an index may be a stranger's.
    """
    if _checkout_version(_PROJECT) is not None:
        return f"make -C {_PROJECT.parent} install"
    try:
        all_of = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        all_of = []
    of_extra = [line.partition(";")[0].strip() for line in all_of if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    return f"pip install {' '.join(map(repr, of_extra))}" if of_extra else "make install in a checkout"


def _checkout_version(path: Path) -> str | None:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    # If the package was copied, the file may belong to another project.
    return project.get("version") if project.get("name") == DISTRIBUTION else None
