"""Every test file of the worker runs on a GPU."""

from pathlib import Path

from tests.architecture.source import ROOT
from tests.gpu.parts import FILES, WORKER_TESTS, parts


def test_every_worker_test_file_belongs_to_one_part() -> None:
    root = ROOT / WORKER_TESTS
    listed = [file for names in FILES.values() for name in names for file in files_of(root / name)]
    assert sorted(listed) == files_of(root)


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def test_no_two_parts_have_the_same_name() -> None:
    names = [part.name for part in parts()]
    assert len(set(names)) == len(names)
