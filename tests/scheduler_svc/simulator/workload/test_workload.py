"""Traces are read in both formats with errors that name the line; synthetic workloads have the requested shape."""

import inspect
import itertools
import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_svc.simulator.traces import REQUESTS, TraceFormat, read_trace, write_trace
from scheduler_svc.simulator.workload import Arrival, Spacing, Synthetic, parse_lengths
from tests.scheduler_svc.simulator.rig import VOCAB_SIZE, arrivals

MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 4]},
    {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [7]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9805900,374,44
2023-11-17 00:00:00.2305900,5,1
2023-11-17 00:00:01,396,109
"""


def mooncake(folder: Path, lines: list[Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
def test_a_mooncake_trace_is_read(tmp_path: Path, mark: bytes) -> None:
    path = mooncake(tmp_path, MOONCAKE)
    path.write_bytes(mark + path.read_bytes())
    trace = read_trace(path)
    assert trace.at.tolist() == [0, 1.5, 3] and trace.own_rate == pytest.approx(2 / 3)
    assert trace.shared_blocks == pytest.approx(2 / 7)
    first, second, third = trace.arrivals(trace.own_rate, VOCAB_SIZE)
    assert [len(each.prompt) for each in (first, second, third)] == [1030, 1100, 600]
    assert [each.output_tokens for each in (first, second, third)] == [3, 4, 1]
    # Equal ids give equal tokens, other ids other tokens; tokens without an id belong to one request.
    assert (first.prompt[:1024] == second.prompt[:1024]).all()
    assert not (first.prompt[1024:] == second.prompt[1024:1030]).all()
    assert first.prompt.dtype == np.int32
    assert first.prompt.min() >= 0 and first.prompt.max() < VOCAB_SIZE - 1
    assert len(np.unique(np.concatenate([first.prompt, third.prompt]))) > VOCAB_SIZE // 2


def test_another_rate_changes_only_the_times(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path, MOONCAKE))
    own, twice = list(trace.arrivals(2 / 3, VOCAB_SIZE)), list(trace.arrivals(4 / 3, VOCAB_SIZE))
    assert [each.at for each in twice] == pytest.approx([each.at / 2 for each in own])
    assert all((a.prompt == b.prompt).all() for a, b in zip(own, twice, strict=True))


def test_an_azure_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert trace.at == pytest.approx([0, 0.25, 1.01941], abs=1e-5)
    assert trace.inputs.tolist() == [374, 5, 396] and trace.outputs.tolist() == [44, 1, 109]
    first, second, _ = trace.arrivals(trace.own_rate, VOCAB_SIZE)
    assert not (first.prompt[:5] == second.prompt).all()
    path.write_text(AZURE.replace(",374", "+00:00,374").replace("1,396", "1Z,396"))
    assert read_trace(path).at == pytest.approx(trace.at)


def test_lines_out_of_order_are_sorted_with_their_blocks(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path, [MOONCAKE[2], "", MOONCAKE[0], MOONCAKE[1]]))
    straight = read_trace(mooncake(tmp_path, MOONCAKE))
    assert trace.inputs.tolist() == straight.inputs.tolist()
    assert trace.blocks.tolist() == straight.blocks.tolist()
    assert trace.block_ends.tolist() == straight.block_ends.tolist()


def test_the_first_n_requests_of_a_trace_can_be_read(tmp_path: Path) -> None:
    assert read_trace(mooncake(tmp_path, [*MOONCAKE[:2], "no JSON"]), limit=2).num_requests == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: it is not a JSON object"),
        ({"timestamp": -1}, "line 2: timestamp is -1; it must be a number of milliseconds"),
        ({"timestamp": None}, "line 2: timestamp is None"),
        ({"timestamp": True}, "line 2: timestamp is True"),
        ({"input_length": 1.5}, "line 2: input_length is 1.5; it must be a number from 0 to 10000000"),
        ({"output_length": "9"}, "line 2: output_length is '9'"),
        ({"hash_ids": 3}, "line 2: hash_ids is 3; it must be a list"),
        ({"hash_ids": [1, -2, 3]}, "line 2: hash_ids has -2; it must be a number from 0"),
        ({"hash_ids": [1, 2, 3, 4]}, r"line 2: it has 4 hash_ids for 1030 tokens; blocks of 512 tokens make 2 or 3"),
        (
            {"input_length": 1024, "hash_ids": [1]},
            r"line 2: it has 1 hash_ids for 1024 tokens; blocks of 512 tokens make 2$",
        ),
    ],
)
def test_the_error_for_a_bad_mooncake_line_names_it(tmp_path: Path, line: Any, message: str) -> None:
    bad = {**MOONCAKE[0], **line} if isinstance(line, dict) else line
    with pytest.raises(ValueError, match=message):
        read_trace(mooncake(tmp_path, [MOONCAKE[0], bad]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("TIMESTAMP,ContextTokens\n", "line 1: it has no column GeneratedTokens"),
        (AZURE.replace(",5,1", ",5"), "line 3: it has 2 cells; the header has 3"),
        (AZURE.replace(",5,1", ",x,1"), "line 3: ContextTokens is 'x'"),
        (AZURE.replace(",5,1", ",5,-1"), "line 3: GeneratedTokens is '-1'"),
        (AZURE.replace("2023-11-17 00:00:01", "soon"), "line 4: TIMESTAMP is 'soon'; it must be like 2023"),
        ("x" * (1 << 20), "line 1: it is longer than 1048576 characters"),
    ],
)
def test_the_error_for_a_bad_azure_line_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path, TraceFormat.AZURE)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_trace(path)


# Made-up traces --------------------------------------------------------------------------------------------------


def test_a_written_trace_has_the_shape_of_the_published_one(tmp_path: Path) -> None:
    assert inspect.signature(write_trace).parameters["requests"].default == REQUESTS == 23_608
    write_trace(tmp_path / "made.jsonl", requests=8_000)
    trace = read_trace(tmp_path / "made.jsonl")
    assert trace.num_requests == 8_000
    assert 3500 < trace.at[-1] <= 3600
    assert 8_000 < trace.inputs.mean() < 9_200 and trace.inputs.max() > 60_000 > np.percentile(trace.inputs, 99) / 2
    assert 170 < trace.outputs.mean() < 195
    assert 0.40 < trace.shared_blocks < 0.50
    with pytest.raises(FileExistsError):
        write_trace(tmp_path / "made.jsonl")


# Synthetic -------------------------------------------------------------------------------------------------------


def synthetic(count: int = 4000, **changes: Any) -> Synthetic:
    defaults = {"own_rate": 50.0, "inputs": parse_lengths("uniform:4:20"), "outputs": parse_lengths("exponential:8")}
    return Synthetic(num_requests=count, **{**defaults, **changes})


def gaps(workload: Synthetic) -> np.ndarray[Any, Any]:
    return np.diff([each.at for each in arrivals(workload)])


@pytest.mark.parametrize(
    ("spacing", "variation"), [(Spacing.POISSON, 1.0), (Spacing.UNIFORM, 0.0), (Spacing.BURSTY, 3.0)]
)
def test_arrivals_have_the_rate_and_spread_of_their_spacing(spacing: Spacing, variation: float) -> None:
    found = gaps(synthetic(6_000, spacing=spacing))
    assert found.mean() == pytest.approx(1 / 50, rel=0.1)
    assert found.std() / found.mean() == pytest.approx(variation, rel=0.15, abs=1e-6)


def test_the_seed_decides_the_requests_and_the_rate_only_the_times() -> None:
    def same(a: Arrival, b: Arrival) -> bool:
        return a.output_tokens == b.output_tokens and np.array_equal(a.prompt, b.prompt)

    one, again, other = (list(arrivals(synthetic(50, seed=seed))) for seed in (1, 1, 2))
    faster = list(arrivals(synthetic(50, seed=1), rate=100))
    assert all(same(a, b) and a.at == b.at for a, b in zip(one, again, strict=True))
    assert all(same(a, b) and b.at == pytest.approx(a.at / 2) for a, b in zip(one, faster, strict=True))
    assert not any(same(a, b) for a, b in zip(one, other, strict=True))


def test_a_billion_requests_are_drawn_lazily() -> None:
    assert len(list(itertools.islice(arrivals(synthetic(1_000_000_000)), 5))) == 5


def test_prefixes_are_shared_within_a_group_only() -> None:
    prompts = [each.prompt for each in arrivals(synthetic(300, prefix_groups=3, prefix_tokens=40))]
    heads = {prompt[:40].tobytes() for prompt in prompts}
    assert len(heads) == 3
    assert len({prompt[40:].tobytes() for prompt in prompts}) == 300
    with pytest.raises(ValueError, match="the prefixes have 1000000000 tokens; the limit is "):
        synthetic(prefix_groups=1_000_000, prefix_tokens=1000)


def test_a_greedy_tenant_sends_its_share() -> None:
    counts = np.bincount([each.tenant for each in arrivals(synthetic(num_tenants=4, greedy_share=0.7))]) / 4000
    assert counts == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.03)
    even = np.bincount([each.tenant for each in arrivals(synthetic(num_tenants=4))]) / 4000
    assert even == pytest.approx([0.25] * 4, abs=0.03)


@pytest.mark.parametrize(
    ("text", "mean", "least", "most"),
    [
        ("512", 512, 512, 512),
        ("uniform:10:20", 15, 10, 20),
        ("exponential:100:150", None, 1, 150),
        ("exponential:1000", 1000, 1, None),
        ("lognormal:8000:1", 8000, 1, None),
        ("lognormal:8000:1:9000", None, 1, 9000),
    ],
)
def test_lengths_have_their_mean_and_bounds(text: str, mean: float | None, least: int, most: int | None) -> None:
    drawn = parse_lengths(text).draw(np.random.default_rng(0), 50_000)
    assert drawn.min() >= least and (most is None or drawn.max() == most)
    assert mean is None or drawn.mean() == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "uniform:1", "uniform:9:3", "normal:3:4", "lognormal:100", "lognormal:100:99", "nan", "5:6"]
)
def test_malformed_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it must be N, uniform|must be from|must be at most"):
        parse_lengths(text)
