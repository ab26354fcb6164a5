"""The core's benchmark runs, and its lines hold the promised, consistent figures; times are not tested."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.measure import core
from tests.measure.core import judged
from tests.measure.schedulers.loaded_core import ADMITTED_TOKENS, PAGE_SIZE, LoadedCore

PROMISED = {
    "rows",
    "step_us",
    "plan_bytes",
    "encode_us",
    "decode_us",
    "admit_cold_us",
    "admit_cached_us",
    "step_us_10000_waiting",
}

NANO_VLLM = {
    "nanovllm/sampling_params.py": """
from dataclasses import dataclass

@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
""",
    "nanovllm/engine/sequence.py": """
class Sequence:
    def __init__(self, token_ids, sampling_params):
        self.token_ids = token_ids
""",
    "nanovllm/engine/scheduler.py": """
class Scheduler:
    def __init__(self, config):
        self.waiting, self.running = [], []

    def add(self, sequence):
        self.waiting.append(sequence)

    def schedule(self):
        print("output of the peer")
        is_prefill = bool(self.waiting)
        self.running += self.waiting
        self.waiting = []
        return self.running, is_prefill

    def postprocess(self, sequences, tokens, is_prefill):
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
""",
}


@pytest.fixture
def nano_vllm(tmp_path: Path) -> Path:
    """A fake checkout with the calls of nano-vllm's scheduler."""
    for name, text in NANO_VLLM.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def objects(printed: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, printed.splitlines())


def test_every_line_of_json_has_the_documented_figures(nano_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = core.main(["--json", "--rows", "8", "--steps", "20", "--nano-vllm", str(nano_vllm)])
    about, line, peer, *bars = objects(capsys.readouterr().out)
    assert about["machine"]["cores"]
    assert line.keys() >= PROMISED
    assert line["rows"] == peer["rows"] == 8
    assert all(line[name] > 0 for name in PROMISED)
    assert 4 * 8 <= line["plan_bytes"] <= line["plan_bytes_most"]
    for name, spread in line["spread"].items():
        assert spread["p10"] <= line[name] <= spread["p90"]
    worse = max(line["waiting"].values(), key=lambda of: of["adds"])
    assert line["step_us_10000_waiting"] == worse["step_us"]
    assert line["waiting_adds"] == worse["adds"]
    assert line["step_us_look"] > 0
    assert line["admit_cached_tokens"] == ADMITTED_TOKENS - PAGE_SIZE
    assert peer["peer"] == "nano-vllm" and peer["step_us"] > 0
    assert bars == [bar.line() for bar in judged([line])]
    assert code == (0 if all(bar["met"] for bar in bars) else 1)


def test_a_peer_that_does_not_run_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert core.main(["--rows", "8", "--steps", "1", "--nano-vllm", str(tmp_path)]) == 2
    assert "nano-vllm ended with exit code 1" in capfd.readouterr().err


def test_the_cost_of_waiting_includes_work_done_once_per_turn() -> None:
    rarely = [10.0] * 31 + [26.0]
    assert core.added(3 * rarely, 3 * 32 * [10.0]) == pytest.approx(0.05)
    assert core.added(2 * rarely + 32 * [100.0], 3 * 32 * [10.0]) == pytest.approx(0.05)


def test_rows_cross_page_edges_constantly_and_evict_cached_pages() -> None:
    loaded = LoadedCore(64, 512, 130)
    before = loaded.load()
    crossed = 0
    for _ in range(128):
        plan = loaded.step()
        assert plan is not None
        crossed += len(plan.append_rows)
    assert crossed == 64
    assert loaded.load().pages_used == before.pages_used + 64


LINE = {
    "rows": 1024,
    "step_us": 400.0,
    "plan_bytes_most": 4 * 1024 + 4096,
    "admit_cold_us": 200.0,
    "waiting_adds": 0.05,
}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, ""),
        ({"step_us": 501.0}, "us per step"),
        ({"plan_bytes_most": 4 * 1024 + 4097}, "bytes of a plan"),
        ({"admit_cold_us": 201.0}, "cold admission"),
        ({"waiting_adds": 0.051}, "waiting"),
    ],
)
def test_each_figure_is_compared_with_its_limit(changed: dict[str, float], missed: str) -> None:
    bars = judged([{**LINE, **changed}])
    assert len(bars) == 4
    found = [bar.name for bar in bars if not bar.is_met]
    assert len(found) == len(changed)
    assert all(missed in bar for bar in found)


def test_the_cost_of_many_rows_is_compared_with_few() -> None:
    many = {**LINE, "rows": 4096, "plan_bytes_most": 4 * 4096}
    growth = judged([LINE, {**many, "step_us": 4.5 * 400}])[-1]
    assert (growth.value, growth.is_met) == (4.5, True)
    assert not judged([LINE, {**many, "step_us": 4.6 * 400}])[-1].is_met
