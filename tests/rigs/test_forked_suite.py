"""Tests that run in several forked processes are reported as in one, whatever they do."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.pages.blocks import ROOT

_CONFTEST = """
from tests.rigs.forked_suite import ForkedSuite

def pytest_configure(config):
    config.pluginmanager.register(ForkedSuite(2))
"""
_FILES = {
    "test_ends.py": """
import os, pytest
def test_passes(): pass
def test_fails(): print("words"); assert [1] == [2]
@pytest.mark.skip(reason="why")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
def test_kills_its_process(): os.kill(os.getpid(), 9)
def test_exits(): os._exit(3)
def test_after(): pass
@pytest.fixture
def broken(): raise ValueError("in a fixture")
def test_with_a_broken_fixture(broken): pass
""",
    "test_fixtures.py": """
import pytest
@pytest.fixture(scope="module")
def made(tmp_path_factory): yield tmp_path_factory.mktemp("made"); print("module's end")
@pytest.mark.parametrize("each", range(20))
def test_shares(made, each): (made / str(each)).touch(exist_ok=False); assert len(list(made.iterdir())) == each + 1
""",
    "test_others.py": """
import os, threading
def test_this_process_is_another(): assert os.environ["PARENT"] == str(os.getppid())
def test_a_thread(): threading.Thread(target=print).start()
""",
    "test_quiet.py": """
import os
os.environ["PARENT"] = str(os.getpid())
def test_out(capfd): print(1); assert capfd.readouterr().out == "1\\n"
""",
}


def _run(folder: Path, files: dict[str, str], *flags: str, is_late: bool = False) -> tuple[int, str]:
    for name, text in {"conftest.py": _CONFTEST, "pytest.ini": "[pytest]\n", **files}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert bool(done.stderr) == is_late
    return done.returncode, done.stdout + done.stderr


def test_every_end_of_a_test_is_reported(tmp_path: Path) -> None:
    code, output = _run(tmp_path, _FILES)
    assert code == 1
    assert re.search(r"3 failed, 25 passed, 1 skipped, 1 xfailed, 1 error in ", output), output
    for text in (
        "FAILED test_ends.py::test_fails - assert [1] == [2]",
        "FAILED test_ends.py::test_kills_its_process - the process that ran this test ended with -9",
        "FAILED test_ends.py::test_exits - the process that ran this test ended with 3",
        "ERROR test_ends.py::test_with_a_broken_fixture - ValueError: in a fixture",
        "SKIPPED [1] test_ends.py:5: why",
        "XFAIL test_ends.py::test_expected",
    ):
        assert text in output
    assert "Captured stdout call" in output and "words" in output


def test_the_first_failure_ends_the_run_if_it_shall(tmp_path: Path) -> None:
    code, output = _run(tmp_path, {"test_one.py": "def test_a(): assert 0\n" + "def test_b(): pass\n"}, "-x")
    assert code == 1 and "1 failed in" in output and "stopping after 1 failures" in output


def test_an_error_while_collecting_is_one_of_the_run(tmp_path: Path) -> None:
    code, output = _run(tmp_path, {"test_one.py": "import nothing_of_this_name", "test_two.py": "def test(): pass"})
    assert code == 2 and "1 error in" in output


def test_a_test_that_takes_too_long_ends_its_process_and_shows_where(tmp_path: Path) -> None:
    waits = "import pytest, threading\n@{}\ndef test_waits(): threading.Event().wait()\ndef test_after(): pass\n"
    for mark, flags in (("pytest.mark.timeout(1)", ()), ("pytest.mark.skipif(False, reason='')", ("--timeout=1",))):
        code, output = _run(tmp_path, {"test_one.py": waits.format(mark)}, *flags, is_late=True)
        assert code == 1 and "1 failed, 1 passed in" in output
        assert "test_waits - the process that ran this test ended with -6" in output
        assert re.search(r"test_one\.py\", line 3 in test_waits", output)
