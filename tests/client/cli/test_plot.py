"""`tandem plot`: what it prints, which file it writes, and which errors it reports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from tandem_client.cli.__main__ import app
from tandem_client.plot import chart
from tests.client.plot.step_logs import written

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "steps.csv")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client"), str(ROOT / "protos"), str(ROOT / ".stubs")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )


def test_plot_prints_the_table_and_the_path_of_the_picture(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("kind")
    assert lines[-1] == str(file.with_suffix(".png"))
    with Image.open(lines[-1]) as image:
        assert (image.format, image.size) == ("PNG", (1600, 1000))


def test_output_and_width_set_the_path_and_the_width_of_the_picture(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.png"
    target.write_text("an older picture")
    result = run(file, "--output", target, "--width", "800", "--by-time")
    assert result.stdout.splitlines()[-1] == str(target)
    with Image.open(target) as image:
        assert image.size == (800, 500)


def test_plot_never_overwrites_the_step_log(tmp_path: Path) -> None:
    file = written(tmp_path / "steps.png")
    before = file.read_text()
    result = run(file)
    assert (result.exit_code, "is the step log itself" in result.stderr) == (2, True)
    assert file.read_text() == before


def test_a_file_that_is_not_a_step_log_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    file.write_text("a,b,c\n1,2,3\n")
    result = run(file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file} has no column")
    assert not file.with_suffix(".png").exists()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture is not drawn, only written."""
    monkeypatch.setattr(chart, "draw", lambda *_, **__: bytes(100_000))


@pytest.mark.usefixtures("undrawn")
def test_an_error_names_the_file_that_does_not_exist(tmp_path: Path, file: Path) -> None:
    missing = run(tmp_path / "none.csv")
    assert (missing.exit_code, missing.stderr) == (1, f"error: {tmp_path / 'none.csv'}: No such file or directory\n")
    target = tmp_path / "no folder" / "a.png"
    nowhere = run(file, "-o", target)
    assert (nowhere.exit_code, nowhere.stderr) == (1, f"error: {target}: No such file or directory\n")


@pytest.mark.parametrize("name", [".", "/", "x" * 300], ids=["here", "root", "long name"])
def test_a_path_that_is_not_a_file_is_refused_in_one_line(name: str) -> None:
    result = run(name)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {name}")


@pytest.mark.usefixtures("undrawn")
def test_an_error_of_a_full_disk_names_the_picture(file: Path) -> None:
    full = run(file, "-o", "/dev/full")
    assert (full.exit_code, full.stderr) == (1, "error: /dev/full: No space left on device\n")


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
sys.meta_path.insert(0, Blocked())
sys.argv = ["tandem", "plot", sys.argv[1]]
from tandem_client.cli.__main__ import main
main()
"""


def test_an_error_without_matplotlib_names_the_command_that_installs_it(file: Path) -> None:
    done = run_python(BLOCK, str(file))
    line = f"error: tandem plot needs matplotlib, which is not installed; install it with: make -C {ROOT} install\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_other_commands_do_not_load_matplotlib() -> None:
    done = run_python(
        "import sys, tandem_client.cli.__main__; print('matplotlib' in sys.modules, 'numpy' in sys.modules)"
    )
    assert done.stdout == "False False\n", done.stderr
