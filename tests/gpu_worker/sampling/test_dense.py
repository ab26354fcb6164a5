"""The dense path chooses what the path of ragged rows chooses, for any mix of parameters of the samples."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gpu_worker.arrays import Space
from gpu_worker.sampling.inputs import (
    LATE_FILTERS,
    DrawInputs,
    LateSamples,
    SamplingInputs,
    allocated_draw_inputs,
    late_samples,
    write_draw_inputs,
)
from gpu_worker.sampling.sampler import EditedLogits, choose, revise, sample
from gpu_worker.trees import mapped
from tests.gpu_worker.sampling.test_sampler import ROWS, inputs_of

GREEDY = {"temperature": 0.0}
# Every filter at its ends, and a rank filter beyond the vocabulary.
EDGES = [
    {"top_p": 0.0},
    {"top_p": 1.0, "min_p": 1.0},
    {"top_k": 10**9, "top_p": 0.3},
    {"temperature": 1e-5, "top_p": 0.9},
    {"temperature": 1e6},
    {"top_k": 1, "min_p": 0.5},
    {"top_k": 129, "top_p": 0.999},
]
DENSE_ROWS = [GREEDY, *(row for row in ROWS if not row.keys() & LATE_FILTERS.keys()), *EDGES, GREEDY]


def columns_of(rows: list[dict[str, float]]) -> dict[str, np.ndarray]:
    """The host's columns, one entry per row."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, **LATE_FILTERS}
    columns = {name: np.array([row.get(name, value) for row in rows], np.float32) for name, value in defaults.items()}
    for name in ("top_k", "sample_idx"):
        columns[name] = np.array([row.get(name, 0) for row in rows], np.int64)
    return {**columns, "seed": np.array([row.get("seed", 0) for row in rows], np.uint64)}


def on_device(tree: DrawInputs | LateSamples, device: torch.device) -> DrawInputs | LateSamples:
    return mapped(tree, lambda array: torch.from_numpy(array).to(device))


def dense_inputs(rows: list[dict[str, float]], device: torch.device, padding: int = 0) -> DrawInputs[Tensor]:
    positions = np.array([row.get("position", 0) for row in rows], np.int64)
    found = allocated_draw_inputs(len(rows), Space())
    write_draw_inputs(found, columns_of(rows), np.arange(len(rows)), positions, padding)
    return on_device(found, device)


def ragged_inputs(rows: list[dict[str, float]], device: torch.device) -> SamplingInputs:
    drawing = [i for i, row in enumerate(rows) if row.get("temperature", 1.0) > 0]
    return inputs_of([rows[i] for i in drawing], device, drawing=drawing)


def by_ragged_rows(logits: Tensor, rows: list[dict[str, float]], edited: EditedLogits | None = None) -> Tensor:
    """The reference, on a CPU. `edited` lies there too."""
    return sample(logits.cpu(), ragged_inputs(rows, torch.device("cpu")), edited).to(logits.device)


def varied(rows: list[dict[str, float]], seed: int) -> list[dict[str, float]]:
    """The rows, each with a key of its own."""
    return [{**row, "seed": (seed << 40) + i, "sample_idx": i % 3, "position": 17 * i} for i, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 7, 131, 300, 1023, 1024, 5000])
def test_every_mix_of_rows_draws_what_the_ragged_rows_draw(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Peaked and flat rows, with ties: a quarter of the values in steps of 1/4, one row of equal logits."""
    generator = torch.Generator().manual_seed(vocab_size)
    for seed in range(2 if vocab_size < 2000 else 1):
        rows = varied(DENSE_ROWS, seed)
        logits = torch.randn(len(rows), vocab_size, generator=generator)
        logits *= torch.tensor([0.05, 1.0, 4.0]).repeat(len(rows))[: len(rows), None]
        logits[::4] = (logits[::4] * 4).round() / 4
        logits[5] = 0.5
        logits = logits.to(device=device, dtype=dtype)
        assert torch.equal(choose(logits, dense_inputs(rows, device)), by_ragged_rows(logits, rows))
        assert torch.equal(choose(logits, None), sample(logits.cpu(), None).to(device))


def test_a_row_of_sums_at_the_border_is_cut_alike(device: torch.device) -> None:
    """Equal shares with exact sums, and top_p at a whole number of shares."""
    logits = torch.zeros(9, 2048, device=device)
    logits[:, 8:] = -200.0
    rows = varied([{"top_p": i / 8} for i in range(9)], 1)
    logits[:, :8] -= torch.arange(8, device=device) * 1e-6
    assert torch.equal(choose(logits, dense_inputs(rows, device)), by_ragged_rows(logits, rows))


@pytest.mark.parametrize("vocab_size", [64, 3000])
def test_revised_rows_draw_what_the_ragged_rows_draw(vocab_size: int, device: torch.device) -> None:
    """Changed logits with bans, typical_p and both, of greedy and drawing samples; two rows that may not sample."""
    rows = varied(
        [*DENSE_ROWS, *(row for row in ROWS if row.keys() & LATE_FILTERS.keys()), {"typical_p": 0.4, "top_k": 3}], 2
    )
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(len(rows), vocab_size, generator=generator)).to(device)
    logits[3, 1] = torch.nan
    drawing = [i for i, row in enumerate(rows) if row.get("temperature", 1.0) > 0]
    changed = torch.tensor([0, 1, 3, 7, len(rows) - 1, len(rows) - 3], device=device)
    scores = logits.index_select(0, changed) * 0.5
    scores[:, ::2] = -torch.inf
    scores[1] = -torch.inf
    pairs = [(e, drawing.index(i)) for e, i in enumerate(changed.tolist()) if i in drawing]
    draws = torch.tensor([e for e, _ in pairs]), torch.tensor([r for _, r in pairs])
    expected = by_ragged_rows(logits, rows, EditedLogits(samples=changed.cpu(), draws=draws, logits=scores.cpu()))
    inputs, late = dense_inputs(rows, device), late_samples(columns_of(rows), np.arange(len(rows)))
    assert late is not None and late.samples.size == sum(len(row.keys() & LATE_FILTERS.keys()) > 0 for row in rows)
    tokens = choose(logits, inputs)
    before = tokens.clone()
    edited = EditedLogits(samples=changed, draws=None, logits=scores)
    revise(tokens, logits, inputs, edited=edited, late=on_device(late, device))
    assert torch.equal(tokens, expected)
    touched = [*changed.tolist(), *late.samples.tolist()]
    others = [i for i in range(len(rows)) if i not in touched]
    assert torch.equal(tokens[others], before[others]) and (tokens[touched] != before[touched]).any()
    assert tokens[1] == tokens[3] == -1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_row_is_marked_and_affects_no_other(bad: float, device: torch.device) -> None:
    rows = varied(DENSE_ROWS, 3)
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(5)).to(device)
    for inputs in (None, dense_inputs(rows, device)):
        expected = choose(logits, inputs)
        broken = logits.clone()
        broken[[0, 4, 9], 17] = bad
        expected[[0, 4, 9]] = -1
        assert torch.equal(choose(broken, inputs), expected)


def test_padding_is_greedy_whatever_its_row_asks_for(device: torch.device) -> None:
    rows = varied([{"temperature": 3.0}, {"temperature": 3.0, "typical_p": 0.5}, GREEDY], 4)
    inputs = dense_inputs([rows[0], rows[2], *[rows[0]] * 20], device, padding=20)
    logits = torch.randn(22, 300, generator=torch.Generator().manual_seed(6)).to(device)
    assert torch.equal(choose(logits, inputs)[1:], logits.argmax(-1)[1:])
    columns = columns_of(rows)
    padded = allocated_draw_inputs(2, Space())
    write_draw_inputs(padded, columns, np.array([2, 0]), np.zeros(2, np.int64), padding=1)
    assert not padded.temperature.any()
    assert late_samples(columns, np.array([0, 2])) is None
    assert late_samples(columns, np.array([0, 1])).samples.tolist() == [1]


def test_a_tiny_temperature_does_not_overflow(device: torch.device) -> None:
    rows = varied([{"temperature": 1e-30}] * 8, 5)
    logits = 30 * torch.randn(8, 100, generator=torch.Generator().manual_seed(7)).to(device)
    assert torch.equal(choose(logits, dense_inputs(rows, device)), logits.argmax(-1))


def test_changed_logits_of_a_greedy_step(device: torch.device) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(8)).to(device)
    scores = torch.full((2, 300), -torch.inf, device=device)
    scores[0, 7], tokens = 1.0, choose(logits, None)
    edited = EditedLogits(samples=torch.tensor([2, 0], device=device), draws=None, logits=scores)
    expected = tokens.clone()
    expected[2], expected[0] = 7, -1
    revise(tokens, logits, None, edited=edited)
    assert torch.equal(tokens, expected)


def test_no_operator_reads_back_or_has_a_shape_that_depends_on_values() -> None:
    """FakeTensorMode has no values and refuses such operators; the tests of a fake device run whole steps in it."""
    rows = varied([*DENSE_ROWS, {"typical_p": 0.5}], 7)
    inputs = dense_inputs(rows, torch.device("cpu"))
    late = on_device(late_samples(columns_of(rows), np.arange(len(rows))), torch.device("cpu"))
    at = torch.tensor([1, 3])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        logits, scores = torch.empty(len(rows), 5000, dtype=torch.bfloat16), torch.empty(2, 5000)
        edited = EditedLogits(samples=at, draws=None, logits=scores)
        tokens = choose(logits, inputs)
        revise(tokens, logits, inputs, edited=edited, late=late)
        with pytest.raises(DataDependentOutputException):
            mode.from_tensor(torch.ones(1)).item()
    assert tokens.shape == (len(rows),) and tokens.dtype == torch.int64
