"""The version of this program. Owns nothing."""

import tomllib
from importlib import metadata
from pathlib import Path

_DISTRIBUTION = "tandem-inference"
_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def version() -> str:
    """Returns the version of the installed distribution, else the version of this checkout."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return str(tomllib.loads(_PYPROJECT.read_text())["project"]["version"])
