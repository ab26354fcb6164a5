"""Models have the sizes of their public configs, a roofline follows the tighter bound, a fit recovers its terms."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.recording.steps_file import HEADER
from scheduler_svc.simulator.cost import (
    FittedCost,
    RecordedSteps,
    Roofline,
    StepShape,
    chunk_attention,
    fit,
    non_negative_least_squares,
    read_steps,
)
from scheduler_svc.simulator.hardware import MACHINES, MODELS

NONE = np.zeros(0, np.int64)


def step(
    chunks: list[tuple[int, int]] | None = None, contexts: list[int] | None = None, *, host_pages: int = 0
) -> StepShape:
    starts, counts = (np.array(column, np.int64) for column in zip(*(chunks or [(0, 0)]), strict=True))
    if not chunks:
        starts = counts = NONE
    decoding = np.array(contexts or [], np.int64)
    return StepShape(
        chunk_starts=starts, chunk_counts=counts, contexts=decoding, samples=len(decoding),
        computed_tokens=int(counts.sum()) + len(decoding), host_pages_moved=host_pages,
    )  # fmt: skip


# Billions of parameters, from the public model cards.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("llama-3.2-1b", 1.24), ("qwen-2.5-7b", 7.62),
        ("qwen-2.5-0.5b", 0.49), ("gemma-2-2b", 2.61), ("gemma-2-9b", 9.24), ("mistral-7b-v0.3", 7.25),
        ("smollm2-135m", 0.135),
    ],
)  # fmt: skip
def test_models_have_the_parameters_of_their_cards(name: str, parameters: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("window", [0, 1, 4, 7, 100])
def test_chunk_attention_equals_a_count_of_all_pairs(window: int) -> None:
    rng = np.random.default_rng(window)
    starts, counts = rng.integers(0, 20, 6), rng.integers(1, 12, 6)
    seen = [
        [key for key in range(query + 1) if not window or key > query - window]
        for start, count in zip(starts, counts, strict=True)
        for query in range(start, start + count)
    ]
    chunks = np.split(np.arange(len(seen)), np.cumsum(counts)[:-1])
    keys = sum(len(set(itertools.chain(*(seen[i] for i in chunk)))) for chunk in chunks)
    assert chunk_attention(starts, counts, window) == (sum(map(len, seen)), keys)


def roofline(model: str = "llama-3.1-8b", **changes: float) -> Roofline:
    ideal = {"flops_efficiency": 1.0, "bandwidth_efficiency": 1.0, "overhead_us": 0.0, **changes}
    return Roofline(machine=MACHINES["h100"], model=MODELS[model], page_size=128, **ideal)  # pyright: ignore


def test_a_small_decode_step_reads_the_weights_once() -> None:
    cost = roofline()
    model = cost.model
    read = 2 * (model.parameters - model.head_parameters)  # all but the embedding table
    assert cost.seconds(step(contexts=[1])) == pytest.approx(read / 3350e9, rel=1e-3)
    assert cost.seconds(step(contexts=[1] * 8)) == pytest.approx(cost.seconds(step(contexts=[1])), rel=1e-3)


def test_a_longer_context_reads_more_cache_entries() -> None:
    cost = roofline()
    more = cost.seconds(step(contexts=[100_001])) - cost.seconds(step(contexts=[1]))
    assert more == pytest.approx(100_000 * 2 * MODELS["llama-3.1-8b"].kv_values / 3350e9)


def test_the_time_of_a_long_prompt_is_bound_by_arithmetic() -> None:
    cost, tokens = roofline(), 4096
    model = cost.model
    linear = 2 * tokens * model.layer_parameters
    attention = 4 * model.layers * model.heads * model.head_dim * tokens * (tokens + 1) // 2
    assert cost.seconds(step([(0, tokens)])) == pytest.approx((linear + attention) / 989e12)
    assert cost.token_us() == pytest.approx(1e6 * (linear + attention) / 989e12 / tokens)
    later = cost.seconds(step([(100_000, tokens)])) - cost.seconds(step([(0, tokens)]))
    assert later == pytest.approx(4 * model.layers * model.heads * model.head_dim * tokens * 100_000 / 989e12)


def test_a_window_bounds_the_reads_of_its_layers() -> None:
    sliding, whole = roofline("mistral-7b-v0.1"), roofline("mistral-7b-v0.3")
    far = step(contexts=[30_000] * 32)
    assert sliding.seconds(far) == pytest.approx(sliding.seconds(step(contexts=[4096] * 32)))
    assert whole.seconds(far) > 2 * sliding.seconds(far)
    half = roofline("gemma-2-2b")
    per_key = 2 * 26 * 4 * 256 * 2
    assert half.seconds(step(contexts=[8000])) - half.seconds(step(contexts=[5000])) == pytest.approx(
        3000 * per_key / 2 / 3350e9
    )


def test_efficiency_overhead_ranks_and_copies_change_the_time() -> None:
    small = step(contexts=[1])
    base = roofline().seconds(small)
    assert roofline(bandwidth_efficiency=0.5).seconds(small) == pytest.approx(2 * base)
    assert roofline(overhead_us=0.25e6).seconds(small) == pytest.approx(base + 0.25)
    assert roofline().seconds(step(contexts=[1], host_pages=3)) == pytest.approx(
        base + 3 * 128 * 2 * MODELS["llama-3.1-8b"].kv_values / 64e9
    )


def test_ranks_wait_for_each_other_in_each_collective() -> None:
    """2 all-reduces per layer and one for the embedding, the logits gathered, the tokens sent."""
    small, base = step(contexts=[1]), roofline().seconds(step(contexts=[1]))
    # With hardly any bytes, the latencies.
    assert roofline(ranks=2).seconds(small) == pytest.approx(base / 2 + (32 * 2 + 3) * 10e-6, rel=0.01)
    slow = roofline(ranks=2, rank_link_us=50.0).seconds(small) - roofline(ranks=2, rank_link_us=0.0).seconds(small)
    assert slow == pytest.approx((32 * 2 + 3) * 50e-6)
    # A link of 10 Gbit/s: each rank of 4 sends 3/4 of the activations twice per all-reduce, and gets 3/4 of the logits.
    rows = step(contexts=[1] * 64)
    fast, ethernet = (roofline(ranks=4, rank_link_gbps=rate).seconds(rows) for rate in (1e6, 10.0))
    moved = 2 * 64 * (2 * 0.75 * 65 * 4096 + 0.75 * 128256)
    assert ethernet - fast == pytest.approx(moved / 1.25e9, rel=1e-4)


def test_key_heads_that_are_fewer_than_ranks_are_on_several() -> None:
    small, large = roofline(ranks=8), roofline(ranks=16)
    assert (large.page_bytes, small.page_bytes) == (2 * small.page_bytes, roofline().page_bytes)


def test_pages_fill_the_memory_that_the_weights_leave_free() -> None:
    cost = roofline()
    assert cost.pages_in(0.9) == int((72e9 - 2 * cost.model.parameters) // (128 * 131072))
    assert roofline("llama-3.1-70b").pages_in(0.9) < 1


# A fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_non_negative_least_squares_meets_the_conditions_of_an_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(30, 4)), rng.normal(size=30)
    found = non_negative_least_squares(a, b)
    gradient = a.T @ (b - a @ found)
    assert (found >= 0).all() and (gradient < 1e-9).all()
    assert gradient[found > 0] == pytest.approx(0, abs=1e-9)


TRUE = np.array([2.0, 0.03, 0.05, 0.002])


def recorded(noise: float = 0.0, count: int = 400) -> RecordedSteps:
    rng = np.random.default_rng(1)
    chunks = rng.choice([0.0, 256.0, 1024.0], count)
    rows, pages = (rng.integers(0, most, count) for most in (64, 4000))
    features = np.stack([np.ones(count), chunks, rows, pages], axis=1)
    return RecordedSteps(features=features, ms=features @ TRUE * (1 + noise * rng.normal(size=count)), pages_total=4000)


def test_a_fit_recovers_the_coefficients() -> None:
    exact = fit(recorded(), page_size=16, copy_us=5.0)
    assert exact.coefficients == pytest.approx(tuple(TRUE))
    assert exact.r_squared == pytest.approx(1.0) and exact.median_error == pytest.approx(0.0, abs=1e-9)
    noisy = fit(recorded(0.05), page_size=16, copy_us=5.0)
    assert noisy.coefficients == pytest.approx(tuple(TRUE), rel=0.1)
    assert 0.02 < noisy.median_error < 0.05 < noisy.p90_error < 0.12
    # 10 + 30 tokens in prompts, rows of 1 and 2 pages, one page from host memory.
    ms = TRUE @ [1, 40, 2, 3]
    assert exact.seconds(step([(0, 10), (5, 30)], [16, 17], host_pages=1)) == pytest.approx(1e-3 * ms + 5e-6)


def test_outliers_are_left_out_and_counted() -> None:
    steps = recorded()
    steps.ms[:3] *= 5000  # compiles
    found = fit(steps, page_size=16, copy_us=0.0)
    assert found.left_out == 3
    assert found.coefficients == pytest.approx(tuple(TRUE), rel=0.05)
    assert "3 left out as outliers" in found.verdict


def steps_file(folder: Path, lines: list[dict[str, object]]) -> Path:
    path, columns = folder / "steps.csv", HEADER.strip().split(",")
    rows = [",".join(str(line.get(column, 0)) for column in columns) for line in lines]
    path.write_text(HEADER + "\n".join([*rows, ""]))
    return path


def lines(count: int) -> list[dict[str, object]]:
    line = {"kind": "decode", "cause": "", "decode_tokens": 2, "pages_used": 7, "pages_total": 100, "ms": 3.5}
    return [dict(line) for _ in range(count)]


def test_read_steps_reads_timed_steps_only(tmp_path: Path) -> None:
    others: list[dict[str, object]] = [{"kind": "joined"}, {"kind": "reset", "ms": 9}]
    prefill: dict[str, object] = {"kind": "prefill", "prefill_tokens": 5, "pages_used": 9, "ms": 4}
    steps = read_steps(steps_file(tmp_path, [*others, *lines(20), prefill]))
    assert steps.ms.tolist() == [3.5] * 20 + [4]
    # Pages count only in steps with decode rows.
    assert steps.features[[0, -1]].tolist() == [[1, 0, 2, 7], [1, 5, 0, 0]]
    assert steps.pages_total == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms": "x"}, "line 6: ms is 'x'; it must be a number from 0"),
        ({"decode_tokens": -1}, "line 6: decode_tokens is '-1'"),
        ({"pages_used": "nan"}, "line 6: pages_used is 'nan'"),
    ],
)
def test_the_error_for_a_bad_cell_names_it(tmp_path: Path, change: dict[str, object], message: str) -> None:
    many = lines(30)
    many[4].update(change)
    with pytest.raises(ValueError, match=message):
        read_steps(steps_file(tmp_path, many))


def test_files_that_cannot_be_fitted_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="19 timed steps; a fit needs at least 20"):
        read_steps(steps_file(tmp_path, lines(19)))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has no column kind, prefill_tokens"):
        read_steps(tmp_path / "other.csv")


def test_a_fit_of_equal_steps_does_not_divide_by_zero(tmp_path: Path) -> None:
    found = fit(read_steps(steps_file(tmp_path, lines(40))), page_size=16, copy_us=0.0)
    assert isinstance(found, FittedCost) and found.median_error == pytest.approx(0.0, abs=1e-9)
