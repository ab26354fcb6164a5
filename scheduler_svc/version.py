"""The version of this program. Owns nothing."""

import tomllib
from importlib import metadata
from pathlib import Path

_DISTRIBUTION = "tandem-inference"
_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def version() -> str:
    """The version of the installed distribution, else that of the checkout which this file is part of."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return str(tomllib.loads(_PYPROJECT.read_text())["project"]["version"])
