"""The sources of the version number."""

import re
from importlib import metadata
from pathlib import Path

import pytest

import tandem_client
from tandem_contract import version


def absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


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
    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(version, "_PROJECT", tmp_path / "pyproject.toml")
    assert version.version() == "unknown"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "tandem-inference"\nversion = "1.2.3"\n')
    assert version.version() == "1.2.3"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nversion = "1.2.3"\n')
    assert version.version() == "unknown"


def test_an_extra_is_installed_by_its_requirements_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No hint names a file that is not there, nor Tandem's name, which an index may give to a stranger."""
    root = version._PROJECT.parent
    assert version.how_to_install("plot") == f"make -C {root} install" and (root / "Makefile").is_file()
    monkeypatch.setattr(version, "_PROJECT", tmp_path / "pyproject.toml")
    extras = metadata.metadata("tandem-inference").get_all("Provides-Extra") or []
    assert {"plot", "gateway", "chat", "worker", "ray"} <= set(extras)
    assert version.how_to_install("plot") == "pip install 'matplotlib>=3.10'"
    for extra in extras:
        assert re.fullmatch(r"pip install( '[\w.-]+[<>=!,.\d]*')+", version.how_to_install(extra)), extra

    monkeypatch.setattr(metadata, "requires", absent)
    assert version.how_to_install("plot") == "make install in a checkout"
