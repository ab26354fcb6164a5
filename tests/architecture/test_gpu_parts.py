"""Nothing of the worker's tests is left out of what runs on a GPU."""

from pathlib import Path

from tests.architecture.source import ROOT
from tests.gpu.parts import FILES, WORKER_TESTS, parts


def test_every_test_file_of_the_worker_stands_in_one_part() -> None:
    root = ROOT / WORKER_TESTS
    listed = [file for names in FILES.values() for name in names for file in files_of(root / name)]
    assert sorted(listed) == files_of(root)


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def test_parts_have_names_of_their_own() -> None:
    names = [part.name for part in parts()]
    assert len(set(names)) == len(names)
