"""`tandem plot`: what it prints, which file it writes, and which errors it reports."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from tandem_client.cli.__main__ import app
from tandem_client.plot import chart
from tests.client.plot.step_logs import written
from tests.rigs.processes import REPOSITORY, child_environment


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "steps.csv")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment())


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
def test_an_error_names_the_file_that_does_not_exist_and_the_picture_on_a_full_disk(tmp_path: Path, file: Path) -> None:
    for asked, named, why in (
        ([tmp_path / "none.csv"], tmp_path / "none.csv", "No such file or directory"),
        ([file, "-o", tmp_path / "none" / "a.png"], tmp_path / "none" / "a.png", "No such file or directory"),
        ([file, "-o", "/dev/full"], "/dev/full", "No space left on device"),
    ):
        failed = run(*asked)
        assert (failed.exit_code, failed.stderr) == (1, f"error: {named}: {why}\n")


@pytest.mark.parametrize("name", [".", "/", "x" * 300], ids=["here", "root", "long name"])
def test_a_path_that_is_not_a_file_is_refused_in_one_line(name: str) -> None:
    result = run(name)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {name}")


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
    install = f"make -C {REPOSITORY} install"
    line = f"error: tandem plot needs matplotlib, which is not installed; install it with: {install}\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_other_commands_do_not_load_matplotlib() -> None:
    done = run_python("import sys, tandem_client.cli.__main__; print({'matplotlib', 'numpy'} & {*sys.modules})")
    assert done.stdout == "set()\n", done.stderr
