"""The command: what it prints, refuses and draws."""

import re
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from scheduler_svc.simulator import memory
from scheduler_svc.simulator.layouts import LAYOUTS
from scheduler_svc.simulator.memory import run
from tandem_contract.settings import SettingError

SMALL = {
    "--sequences": "8", "--lives": "2", "--min-length": "4", "--max-length": "40", "--reserve": "64",
    "--prefix-length": "8", "--memory-tokens": "256",
}  # fmt: skip


def main(*options: str) -> int:
    return run("lab", [*(word for pair in SMALL.items() for word in pair), *options])


def test_the_output_names_the_settings_and_the_figures_of_each_layout(capsys: pytest.CaptureFixture[str]):
    assert main("--seed", "7") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("32.0 MiB of K/V, 128.0 KiB per token; sequences 8, lives 2, ") and "seed 7" in lines[1]
    columns = next(line for line in lines if line.startswith("memory layout")).split()
    assert columns == ["memory", "layout", "contiguous", "growing", "paged", "shared"]
    for words in ("utilisation, mean / peak", "external fragmentation, mean", "saved by sharing"):
        assert any(line.startswith(words) for line in lines)


def test_the_bytes_are_those_of_the_model(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "paged", "--model", "qwen-3-0.6b", "--element-bytes", "1") == 0
    assert "56.0 KiB per token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page-size", "0"], "--page-size is 0; it must be a whole number from 1 to 4,096"),
        (["--model", "gpt-9"], "--model is 'gpt-9'; it must be one of llama-3.1-8b"),
        (["--memory", "heap"], "--memory is 'heap'; it must be one of contiguous, growing, paged, shared, all"),
        (["--page-size", "256"], "--memory-tokens is 256; it must be at least 512 (two pages)"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name_value_and_limit(options: list[str], words: str):
    with pytest.raises((SettingError, ValueError)) as refused:
        main(*options)
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


def test_a_memory_too_small_for_any_sequence_rejects_all(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "contiguous", "--memory-tokens", "48") == 0
    out = capsys.readouterr().out
    assert re.search(r"^rejected / queued +16 / 0$", out, re.MULTILINE)
    assert re.search(r"^would fit at full length +0$", out, re.MULTILINE)


@pytest.mark.parametrize(("layout", "names"), [("all", list(LAYOUTS)), ("paged", ["paged"])])
def test_png_draws_a_strip_per_layout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, names: list[str]
):
    drawn: list[Figure] = []
    draw = memory.draw_picture
    monkeypatch.setattr(memory, "draw_picture", lambda *args: drawn.append(draw(*args)))
    file = tmp_path / "lab.png"
    assert main("--png", str(file), "--memory", layout) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert capsys.readouterr().out.splitlines()[-1] == str(file)
    assert [axes.get_title(loc="left").split(":")[0] for axes in drawn[0].axes] == names
    check_legible(drawn[0])


def check_legible(figure: Figure) -> None:
    """Asserts that no words leave the picture or overlap. Text without spaces is a tick label, which may be hidden."""
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_visible() and " " in text.get_text().strip()
    ]
    assert len(boxes) > 4
    width, height = figure.bbox.size
    for i, (words, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, words
        for other, there in boxes[:i]:
            assert not box.overlaps(there), (words, other)


def test_a_picture_that_cannot_be_written_exits_1(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "nowhere" / "lab.png"
    assert main("--png", str(file)) == 1
    assert capsys.readouterr() == ("", f"error: --png {file}: there is no folder {file.parent}\n")
    # The write fails after the run, so the figures are printed all the same.
    assert main("--memory", "paged", "--png", str(tmp_path)) == 1
    printed = capsys.readouterr()
    assert "utilisation" in printed.out and printed.err == f"error: {tmp_path}: Is a directory\n"


def test_without_matplotlib_the_error_names_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main("--png", str(tmp_path / "lab.png")) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and re.fullmatch(
        r"error: matplotlib\S* is missing: install it with: make -C \S+ install\n", printed.err
    )
