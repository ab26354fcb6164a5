"""Nothing of the worker's tests is left out of what runs on a GPU."""

from tests.architecture.source import ROOT
from tests.gpu.parts import FILES, WORKER_TESTS, parts


def test_every_test_file_of_the_worker_stands_in_one_part() -> None:
    listed = sorted(name for files in FILES.values() for name in files)
    assert listed == sorted(path.stem.removeprefix("test_") for path in (ROOT / WORKER_TESTS).glob("test_*.py"))


def test_parts_have_names_of_their_own() -> None:
    names = [part.name for part in parts()]
    assert len(set(names)) == len(names)
