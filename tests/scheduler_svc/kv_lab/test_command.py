"""The command: what it prints, refuses and draws."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from scheduler_svc.kv_lab.charts import chart
from scheduler_svc.kv_lab.command import add_arguments, run

SMALL = {
    "--sequences": "8", "--lives": "2", "--min-length": "4", "--max-length": "40", "--reserve": "64",
    "--prefix-length": "8",
}  # fmt: skip


def main(*options: str) -> int:
    parser = argparse.ArgumentParser(prog="lab")
    add_arguments(parser)
    # Two words for the memory exclude each other.
    memory = [] if {"--memory-gib", "--memory-tokens"} & set(options) else ["--memory-tokens", "256"]
    return run(parser.parse_args([*(word for pair in SMALL.items() for word in pair), *memory, *options]))


def test_the_last_line_stands_alone(capsys: pytest.CaptureFixture[str]):
    assert main("--seed", "7") == 0
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    assert last.startswith("KV cache of 32.0 MiB (llama-3.1-8b), 16 sequences of 4 to 40 tokens, seed 7 · contiguous ")
    for words in ("growing ", "paged ", "shared ", " × the FLOPs"):
        assert words in last
    for words in ("utilisation, mean / peak", "external, mean / peak", "saved by sharing", "allocate, median / p99 µs"):
        assert words in out


def test_json_is_a_line_per_layout_and_one_of_the_comparison(capsys: pytest.CaptureFixture[str]):
    assert main("--json", "--window", "8") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["memory"] for line in lines] == ["contiguous", "growing", "paged", "shared", "no cache"]
    for line in lines[:4]:
        assert line["total_bytes"] == 256 * line["token_bytes"]
        assert line["used_mean_bytes"] == line["used_mean_tokens"] * line["token_bytes"]
        assert line["read_per_token_bytes"] < line["read_full_per_token_bytes"]
    assert lines[4]["settings"]["window"] == 8
    assert lines[4]["windows"][0]["window"] == 8


def test_one_layout_and_a_memory_in_gib(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "paged", "--memory-gib", "0.5", "--model", "qwen-3-0.6b", "--json") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["memory"], line["total_tokens"]) == ("paged", 2**29 // 114688)


def test_a_model_that_is_changed_says_so(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "paged", "--layers", "1", "--kv-heads", "2", "--element-bytes", "1", "--json") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["geometry"], line["token_bytes"]) == ("llama-3.1-8b, changed", 2 * 1 * 2 * 128 * 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page-size", "0"], "--page-size is 0; it must be from 1 to 4,096"),
        (["--layers", "0"], "--layers is 0; it must be from 1 to 1,048,576"),
        (["--memory-gib", "nan"], "--memory-gib is nan; it must be above 0 and at most 2,048"),
        (["--model", "gpt-9"], "no model is called 'gpt-9'; there are llama-3.1-8b"),
    ],
)
def test_a_refusal_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], options: list[str], words: str):
    assert main(*options) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"error: {words}") and told.err.count("\n") == 1


def test_nothing_fits_is_a_result(capsys: pytest.CaptureFixture[str]):
    assert main("--memory", "contiguous", "--memory-tokens", "48", "--json") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["rejected"], line["sequences"], line["fit_sequences"], line["utilisation_mean"]) == (16, 0, 0, 0)


def test_a_picture_beside_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Figure] = []
    figure_of = chart.figure_of
    monkeypatch.setattr(chart, "figure_of", lambda *args: drawn.append(figure_of(*args)) or drawn[0])
    file = tmp_path / "lab.png"
    assert main("--png", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == str(file) and lines[-1].startswith("KV cache of ")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    for words in ("contiguous: ", "growing: ", "paged: ", "shared: ", "memory: ", "fragmentation: ", "sequences at "):
        assert any(title.startswith(words) for title in titles), words
    check_legible(drawn[0])


def check_legible(figure: Figure) -> None:
    """No words leave the picture, and none lie on others. Numbers alone are a scale's, also where it is not drawn."""
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_visible() and " " in text.get_text().strip()
    ]
    assert len(boxes) > 20
    width, height = figure.bbox.size
    for i, (words, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, words
        for other, there in boxes[:i]:
            assert not box.overlaps(there), (words, other)


def test_where_the_picture_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "nowhere" / "lab.png"
    assert main("--png", str(file)) == 1
    assert capsys.readouterr() == ("", f"error: --png {file}: there is no folder {file.parent}\n")
    # Found out when all is done: the figures are told all the same.
    monkeypatch.setattr(chart, "draw", lambda *_: b"")
    assert main("--memory", "paged", "--png", str(tmp_path)) == 1
    told = capsys.readouterr()
    assert "utilisation" in told.out and told.err == f"error: {tmp_path}: Is a directory\n"


def test_without_matplotlib_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "scheduler_svc.kv_lab.charts.chart")
    monkeypatch.delattr("scheduler_svc.kv_lab.charts.chart")
    assert main("--png", str(tmp_path / "lab.png")) == 1
    told = capsys.readouterr()
    assert told.out == "" and re.fullmatch(r"error: matplotlib\S* is missing: make install\n", told.err)
