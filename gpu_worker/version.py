"""The worker's version of Tandem: from the installed distribution, else from the checkout."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "tandem-inference"


def version_line() -> str:
    """The output of --version, such as `tandem 0.1.0`."""
    try:
        return f"tandem {version(DISTRIBUTION)}"
    except PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        return f"tandem {tomllib.loads(project.read_text())['project']['version']}"
