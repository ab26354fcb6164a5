"""Sampling: exact filters, the right distribution, and tokens that depend only on their key."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from gpu_worker.sampling import choice, sampler
from gpu_worker.sampling.choice import gumbel_noise, noise_keys
from gpu_worker.sampling.inputs import FEW_RANKS, LATE_FILTERS, LateFilter, RankGroup, SamplingInputs
from gpu_worker.sampling.sampler import EditedLogits, filtered, sample


def inputs_of(rows: list[dict[str, float]], device: torch.device, drawing: list[int] | None = None) -> SamplingInputs:
    """One drawing row per dict; missing names are off."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype, device=device)

    ranked = [(i, row.get("top_k", 0)) for i, row in enumerate(rows) if row.get("top_k") or row.get("top_p", 1.0) < 1]
    few = [i for i, top_k in ranked if 0 < top_k <= FEW_RANKS]
    many = [i for i, top_k in ranked if not 0 < top_k <= FEW_RANKS]
    groups = [
        RankGroup(places=None if len(places) == len(rows) else torch.tensor(places, device=device), few=places is few)
        for places in (few, many)
        if places
    ]
    late = [
        LateFilter(
            name=name, places=torch.tensor(places, device=device), values=column(name, off, torch.float32)[places]
        )
        for name, off in LATE_FILTERS.items()
        if (places := [i for i, row in enumerate(rows) if row.get(name, off) != off])
    ]
    return SamplingInputs(
        rows=torch.tensor(drawing or range(len(rows)), device=device),
        temperature=column("temperature", 1.0, torch.float32),
        top_p=column("top_p", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 0, torch.int64),
        sample_idx=column("sample_idx", 0, torch.int64),
        position=column("position", 0, torch.int64),
        rank_groups=tuple(groups),
        filters_min_p=any(row.get("min_p", 0) for row in rows),
        late=tuple(late),
    )


ROWS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_k": 7, "top_p": 0.6, "temperature": 1.3},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "temperature": 0.6},
    {"top_k": 100_000, "top_p": 0.5},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 1.7},
    {"typical_p": 0.01},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.5, "temperature": 0.6},
]


def warpers_of(row: Mapping[str, float]) -> LogitsProcessorList:
    """Transformers' own temperature and filters, in worker.proto's order."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(row.get("temperature", 1.0)))]
    if row.get("top_k"):
        warpers.append(TopKLogitsWarper(int(row["top_k"])))
    if row.get("top_p", 1.0) < 1:
        warpers.append(TopPLogitsWarper(row["top_p"]))
    if row.get("min_p"):
        warpers.append(MinPLogitsWarper(row["min_p"]))
    if row.get("typical_p", 1.0) < 1:
        warpers.append(TypicalLogitsWarper(row["typical_p"]))
    return LogitsProcessorList(warpers)


# The largest vocabulary avoids a whole sort.
@pytest.mark.parametrize("vocab_size", [40, 300, 5000])
def test_filters_keep_what_transformers_keeps(vocab_size: int, device: torch.device) -> None:
    logits = 3 * torch.randn(len(ROWS), vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
    ours = filtered(logits, inputs_of(ROWS, device))
    for i, row in enumerate(ROWS):
        scores = warpers_of(row)(None, logits[i : i + 1])
        assert torch.equal(ours[i].isfinite(), scores[0].isfinite()), row
        kept = ours[i].isfinite()
        torch.testing.assert_close(ours[i][kept], scores[0][kept], rtol=1e-6, atol=1e-6)


def test_every_late_filter_does_something() -> None:
    assert LATE_FILTERS.keys() == choice.LATE_FILTERS.keys()


def test_typical_p_may_remove_the_most_probable_token(device: torch.device) -> None:
    """One token has 0.4, the others share the rest: the entropy of 3.2 is closer to their 4.7 than to its 0.9."""
    share = torch.full((1, 65), 0.6 / 64)
    share[0, 7] = 0.4
    kept = filtered(share.log().to(device), inputs_of([{"typical_p": 0.4}], device)).isfinite()
    assert not kept[0, 7] and kept.sum() == 64


def test_typical_p_in_parts_is_that_of_all_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(9)).to(device)
    inputs = inputs_of([{"typical_p": 0.02 * (i + 1)} for i in range(40)], device)
    whole = filtered(logits, inputs)
    monkeypatch.setattr(sampler, "MAX_SCRATCH", 7 * 300)
    assert torch.equal(filtered(logits, inputs), whole)


def test_partial_ranks_keep_what_a_whole_sort_keeps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from one certain token to nearly flat, with ties: some need few ranks, some more, some all."""
    logits = torch.randn(60, 20_000, generator=torch.Generator().manual_seed(2)).to(device)
    logits *= torch.linspace(0.02, 8, 60, device=device)[:, None]
    logits[::3] = (logits[::3] * 4).round() / 4
    rows = [{"top_p": (0.2, 0.9, 0.999)[i % 3], "top_k": (0, 300, 9000)[i // 20]} for i in range(60)]
    rows[7] = {"top_k": 700}
    partial = filtered(logits, inputs_of(rows, device))
    monkeypatch.setattr(choice, "_CPU_RANKS", ())
    whole = filtered(logits, inputs_of(rows, device))
    assert torch.equal(partial, whole)
    num_kept = whole.isfinite().sum(-1)
    assert num_kept.min() == 1 and num_kept.max() > 4096 and ((num_kept > 256) & (num_kept < 4096)).any()


def test_sparse_noise_equals_the_noise_of_all_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn(40, 3000, generator=torch.Generator().manual_seed(6)).to(device)
    inputs = inputs_of([{"top_k": 40, "seed": i, "position": 3 * i} for i in range(40)], device)
    sparse = sample(logits, inputs)
    monkeypatch.setattr(sampler, "SMALL_VOCABULARY", 1 << 20)
    monkeypatch.setattr(choice, "MAX_SCRATCH", 7 * 3000)
    assert torch.equal(sparse, sample(logits, inputs))


def test_a_tiny_temperature_is_greedy_without_overflow(device: torch.device) -> None:
    logits = 30 * torch.randn(8, 100, generator=torch.Generator().manual_seed(7)).to(device)
    inputs = inputs_of([{"temperature": 1e-5, "seed": i, "top_p": (0.9, 1.0)[i % 2]} for i in range(8)], device)
    assert torch.equal(sample(logits, inputs), logits.argmax(-1))


def test_draws_follow_the_exact_probabilities(device: torch.device) -> None:
    """Chi-square of 40,000 draws by position, seed and sample in turn, with filters on, against exact probabilities."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5], device=device)
    num = 40_000
    row = {"temperature": 0.8, "top_k": 6, "top_p": 0.97}
    exact = filtered(logits[None], inputs_of([row], device)).double().softmax(-1)[0].cpu()
    support = exact > 0
    assert 4 <= int(support.sum()) < 8
    for name in ("position", "seed", "sample_idx"):
        rows = [{**row, name: i} for i in range(num)]
        tokens = sample(logits.expand(num, -1), inputs_of(rows, device)).cpu()
        counts = tokens.bincount(minlength=8).double()
        assert counts[~support].sum() == 0
        statistic = ((counts - num * exact)[support].pow(2) / (num * exact[support])).sum().item()
        # Mean df, variance 2 df; five deviations.
        df = int(support.sum()) - 1
        assert statistic < df + 5 * math.sqrt(2 * df), (name, statistic)


def test_draws_of_different_positions_are_independent(device: torch.device) -> None:
    """Pairs of tokens at neighbouring positions of one seed, against the product of their probabilities."""
    logits = torch.tensor([1.0, 0.0, 0.3], device=device)
    num = 30_000
    rows = [{"seed": i // 2, "position": i % 2} for i in range(2 * num)]
    tokens = sample(logits.expand(2 * num, -1), inputs_of(rows, device)).cpu().view(num, 2)
    exact = logits.double().softmax(-1).cpu()
    counts = (tokens[:, 0] * 3 + tokens[:, 1]).bincount(minlength=9).double()
    expected = num * (exact[:, None] * exact[None, :]).flatten()
    assert ((counts - expected).pow(2) / expected).sum() < 8 + 5 * 4


def test_equal_keys_draw_equal_tokens_in_every_batch(device: torch.device) -> None:
    """A row alone, at another index, among others, beside rows with other filters."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(3)).to(device)
    row = {"seed": 11, "position": 40, "sample_idx": 2, "temperature": 0.9, "top_k": 30}
    others = [{"seed": i, "position": 40, "top_p": 0.5, "temperature": 1.5} for i in range(5)]
    alone = sample(logits[2:3], inputs_of([row], device))[0]
    among = sample(logits, inputs_of([*others[:2], row, *others[2:]], device))[2]
    moved = sample(logits.roll(3, 0), inputs_of([row], device, drawing=[5]))[5]
    assert alone == among == moved


def test_every_part_of_the_key_changes_the_draws(device: torch.device) -> None:
    """With the same logits, another seed, sample or position draws another sequence of tokens."""
    logits = torch.zeros(64, 1000, device=device)
    base = [{"seed": 1, "sample_idx": 1, "position": i} for i in range(64)]
    drawn = [
        sample(logits, inputs_of([{**row, **change} for row in base], device))
        for change in ({}, {"seed": 2}, {"sample_idx": 2})
    ]
    assert len(drawn[0].unique()) > 50
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[i] == drawn[j]).sum() < 4


def test_noise_follows_the_gumbel_distribution(device: torch.device) -> None:
    """Mean and variance of 200,000 values, and equal noise of one key for a longer vocabulary."""
    key = torch.arange(20, device=device)
    keys = noise_keys(key, key * 3, key * 7)[:, None]
    noise = gumbel_noise(keys, torch.arange(10_000, device=device))
    assert noise.isfinite().all()
    assert abs(noise.double().mean().item() - 0.5772157) < 0.01
    assert abs(noise.double().var().item() - math.pi**2 / 6) < 0.03
    assert torch.equal(gumbel_noise(keys, torch.arange(100, device=device)), noise[:, :100])


def test_greedy_rows_take_the_argmax_while_other_rows_sample(device: torch.device) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)).to(device)
    assert torch.equal(sample(logits, None), logits.argmax(-1))
    mixed = sample(logits, inputs_of([{"temperature": 5.0}], device, drawing=[3]))
    others = [0, 1, 2, 4]
    assert torch.equal(mixed[others], logits.argmax(-1)[others])


def test_changed_logits_affect_only_their_rows(device: torch.device) -> None:
    """Greedy and drawing rows; a row with no remaining token is marked like a nonfinite one."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)).to(device)
    changed = torch.full((3, 300), -torch.inf, device=device)
    changed[0, 17] = changed[2, 45] = 0.0
    places = torch.tensor([2], device=device), torch.tensor([1], device=device)
    edits = EditedLogits(samples=torch.tensor([1, 2, 4], device=device), draws=places, logits=changed)
    inputs = inputs_of([{"seed": 1}, {"seed": 2, "top_p": 0.5}], device, drawing=[3, 4])
    free, bound = sample(logits, inputs), sample(logits, inputs, edits)
    assert bound[[1, 2, 4]].tolist() == [17, -1, 45]
    assert torch.equal(bound[[0, 3]], free[[0, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_draw_like_equal_float32_logits(dtype: torch.dtype, device: torch.device) -> None:
    logits = 3 * torch.randn(len(ROWS), 300, generator=torch.Generator().manual_seed(8)).to(device=device, dtype=dtype)
    inputs = inputs_of([{**row, "seed": 3} for row in ROWS], device)
    assert torch.equal(sample(logits, inputs), sample(logits.float(), inputs))
    assert torch.equal(sample(logits, None), logits.float().argmax(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_rows_are_marked(bad: float, device: torch.device) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)).to(device)
    expected = logits.argmax(-1).tolist()
    logits[1, 17] = bad
    assert sample(logits, None).tolist() == [expected[0], -1, expected[2]]
    drawn = sample(logits, inputs_of([{}, {}, {}], device)).tolist()
    assert drawn[1] == -1 and min(drawn[0], drawn[2]) >= 0
