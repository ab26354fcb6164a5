"""The lab's command: what it prints, refuses and draws."""

import json
import re
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from scheduler_svc.kv_lab.charts import chart
from scheduler_svc.kv_lab.command import run
from tandem_contract.settings import SettingError

SMALL = {
    "--sequences": "8", "--lives": "2", "--min-length": "4", "--max-length": "40", "--reserve": "64",
    "--prefix-length": "8",
}  # fmt: skip


def main(*options: str) -> int:
    # The two flags for the memory exclude each other.
    memory = [] if {"--memory-gib", "--memory-tokens"} & set(options) else ["--memory-tokens", "256"]
    return run("lab", [*(word for pair in SMALL.items() for word in pair), *memory, *options])


def test_the_last_line_summarises_the_run(capsys: pytest.CaptureFixture[str]):
    assert main("--seed", "7") == 0
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    assert last.startswith("KV cache of 32.0 MiB (llama-3.1-8b), 16 sequences of 4 to 40 tokens, seed 7 · contiguous ")
    for words in ("growing ", "paged ", "shared ", " × the FLOPs"):
        assert words in last
    for words in (
        "utilisation, mean / peak",
        "external fragmentation, mean",
        "saved by sharing",
        "admission, median / p99 µs",
    ):
        assert words in out


def test_json_prints_a_line_per_layout_and_one_of_the_comparison(capsys: pytest.CaptureFixture[str]):
    assert main("--json", "--window", "8") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["memory"] for line in lines] == ["contiguous", "growing", "paged", "shared", "no cache"]
    for line in lines[:4]:
        assert line["total_bytes"] == 256 * line["token_bytes"]
        assert line["used_mean_bytes"] == line["used_mean_tokens"] * line["token_bytes"]
        assert line["read_per_token_bytes"] < line["read_full_per_token_bytes"]
    assert lines[4]["settings"]["window"] == 8
    assert lines[4]["windows"][0]["window"] == 8


def test_memory_gib_sets_the_memory_of_one_layout(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "paged", "--memory-gib", "0.5", "--model", "qwen-3-0.6b", "--json") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["memory"], line["total_tokens"]) == ("paged", 2**29 // 114688)


def test_the_output_marks_a_model_with_replaced_sizes_as_changed(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "paged", "--layers", "1", "--kv-heads", "2", "--element-bytes", "1", "--json") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["geometry"], line["token_bytes"]) == ("llama-3.1-8b, changed", 2 * 1 * 2 * 128 * 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page-size", "0"], "--page-size is 0; it must be a whole number from 1 to 4,096"),
        (["--layers", "0"], "--layers is 0; it must be a whole number from 1 to 1,048,576"),
        (["--memory-gib", "nan"], "--memory-gib is nan; it must be a number above 0"),
        (["--model", "gpt-9"], "--model is 'gpt-9'; it must be one of llama-3.1-8b"),
        (["--memory", "heap"], "--memory is 'heap'; it must be one of contiguous, growing, paged, shared, all"),
        (["--memory-gib", "3000"], "--memory-gib is 3000; it must be at most 2,048"),
        (["--memory-gib", "1", "--memory-tokens", "256"], "--memory-tokens cannot be combined with --memory-gib"),
        (["--memory-gib", "0.001", "--page-size", "64"], "--memory-tokens is 8; it must be at least 128 (two pages)"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name_value_and_limit(options: list[str], words: str):
    with pytest.raises((SettingError, ValueError)) as refused:
        main(*options)
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


def test_a_memory_too_small_for_any_sequence_rejects_all(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "contiguous", "--memory-tokens", "48", "--json") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["rejected"], line["sequences"], line["fit_sequences"], line["utilisation_mean"]) == (16, 0, 0, 0)


@pytest.mark.parametrize(("flags", "num_panels"), [((), 4), (("--all-panels",), 12), (("--window", "8"), 4)])
def test_png_draws_the_layouts_and_on_request_all_panels(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    num_panels: int,
):
    drawn: list[Figure] = []
    figure_of = chart.figure_of
    monkeypatch.setattr(chart, "figure_of", lambda *args, **named: drawn.append(figure_of(*args, **named)) or drawn[0])
    file = tmp_path / "lab.png"
    assert main("--png", str(file), *flags) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == str(file) and lines[-1].startswith("KV cache of ")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert len(titles) == num_panels
    assert [title.split(":")[0] for title in titles[:4]] == ["contiguous", "growing", "paged", "shared"]
    check_legible(drawn[0])


def test_without_png_the_output_names_the_flag(capsys: pytest.CaptureFixture[str]):
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("--png FILE draws the memory of each layout")


def check_legible(figure: Figure) -> None:
    """Asserts that no words leave the picture or overlap. Text without spaces is a tick label, which may be hidden."""
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_visible() and " " in text.get_text().strip()
    ]
    assert len(boxes) > 10
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
    monkeypatch.delitem(sys.modules, "scheduler_svc.kv_lab.charts.chart")
    monkeypatch.delattr("scheduler_svc.kv_lab.charts.chart")
    assert main("--png", str(tmp_path / "lab.png")) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and re.fullmatch(r"error: matplotlib\S* is missing: make install\n", printed.err)
