"""The version of Tandem, for `--version` and for programs.

Owns the search for the number. Reads no file at import.
"""

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


def _checkout_version(path: Path) -> str | None:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    # If the package was copied, the file may belong to another project.
    return project.get("version") if project.get("name") == DISTRIBUTION else None
