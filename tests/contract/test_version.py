"""The sources of the version number."""

from importlib import metadata
from pathlib import Path

import pytest

import tandem_client
from tandem_contract import version


def test_the_version_is_that_of_the_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def installed(name: str) -> str:
        asked.append(name)
        return "9.8.7"

    monkeypatch.setattr(metadata, "version", installed)
    assert (tandem_client.__version__, asked) == ("9.8.7", ["tandem-inference"])


def test_a_checkout_that_is_not_installed_reads_its_project_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(version, "_PROJECT", tmp_path / "pyproject.toml")
    assert version.version() == "unknown"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "tandem-inference"\nversion = "1.2.3"\n')
    assert version.version() == "1.2.3"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nversion = "1.2.3"\n')
    assert version.version() == "unknown"
