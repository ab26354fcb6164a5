"""Chooses tokens from logits: `choose` for every sample of a step at once, `sample` on a CPU, where few rows draw.

`choose` can be captured: it reads nothing back, and its shapes depend only on S and V, not on what rows ask for. On a
GPU it is two kernels (`choose_kernel.py`), on a CPU torch operators with the results of `sample`. `revise` chooses
again, outside a graph, for the samples that need more: changed logits and late filters. `sample` filters only the rows
that draw.

The filters are applied in the order temperature, top-k, top-p, min-p, late filters, as in Transformers. Noise is a pure
function of (seed, sample, position, token), so a token depends neither on the rest of the batch nor on how often the
step runs. Shape legend: S samples, R samples that draw, E samples with changed logits, G some of the R, n samples with
late filters, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gpu_worker.sampling.choice import (
    LATE_FILTERS,
    MAX_SCRATCH,
    SMALL_VOCABULARY,
    add_noise,
    greedy_tokens,
    gumbel_noise,
    noise_keys,
    parts,
    rank_threshold,
    threshold_within,
)
from gpu_worker.sampling.inputs import DrawInputs, LateFilter, LateSamples, SamplingInputs

_COLUMNS = tuple(column.name for column in fields(DrawInputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedLogits:
    """The changed logits of some samples, which replace the model's."""

    # int64 [E]: indices into the S samples.
    samples: Tensor
    # int64 [n] twice: indices into the E samples and into the R samples, of samples in both. None if there are none.
    draws: tuple[Tensor, Tensor] | None
    # float32 [E, V].
    logits: Tensor


def choose(logits: Tensor, inputs: DrawInputs[Tensor] | None) -> Tensor:
    """Returns tokens int64 [S] for logits [S, V] of any floating dtype; -1 if a row's logits are not all finite.

    Without `inputs` every sample is greedy. A token depends only on its own row and its own parameters.
    """
    return _choose(logits, inputs)[0]


def revise(
    tokens: Tensor,
    logits: Tensor,
    inputs: DrawInputs[Tensor] | None,
    *,
    edited: EditedLogits | None = None,
    late: LateSamples[Tensor] | None = None,
) -> None:
    """Replaces, in `tokens` of `choose`, those of the samples with changed logits or with late filters.

    A token becomes -1 if the changed logits allow none; a token that is -1 stays so.
    """
    if edited is not None:
        # As parameters, so that the GPU's kernels for changed logits are compiled in one variant only.
        inputs = inputs or _all_greedy(tokens)
        revised = _choose(edited.logits, inputs, at=edited.samples, may_ban=True)[0]
        _replace(tokens, edited.samples, revised)
    if late is not None:
        assert inputs is not None, "a greedy sample does not filter"
        samples = late.samples
        scores = _scores(logits, samples, edited)
        # The other filters come first. The scores that all filters leave are drawn from at temperature 1.
        floors = _choose(scores, inputs, at=samples, may_ban=True)[1]
        scores /= inputs.temperature.index_select(0, samples)[:, None]
        scores.masked_fill_(scores < floors[:, None], -torch.inf)
        _filter_late(scores, late.filters)
        _replace(tokens, samples, _choose(scores, _unfiltered(inputs), at=samples, may_ban=True)[0])


def _filter_late(logits: Tensor, filters: Sequence[LateFilter[Tensor]]) -> None:
    """Applies the filters to float32 logits [m, V], in place."""
    for late in filters:
        for part in parts(late.places.numel(), logits.shape[1], MAX_SCRATCH):
            places = late.places[part]
            kept = LATE_FILTERS[late.name](logits.index_select(0, places), late.values[part])
            logits.index_copy_(0, places, kept)


def _replace(tokens: Tensor, samples: Tensor, revised: Tensor) -> None:
    before = tokens.index_select(0, samples)
    tokens.index_copy_(0, samples, torch.where(before < 0, before, revised))


def _scores(logits: Tensor, samples: Tensor, edited: EditedLogits | None) -> Tensor:
    """Returns the logits of `samples` after edits, a float32 copy."""
    scores = logits.index_select(0, samples).float()
    if edited is None:
        return scores
    places = torch.full((logits.shape[0],), -1, device=logits.device)
    places.index_copy_(0, edited.samples, torch.arange(edited.samples.shape[0], device=logits.device))
    at = places.index_select(0, samples)
    return torch.where(at[:, None] < 0, scores, edited.logits.index_select(0, at.clamp(min=0)))


def _all_greedy(tokens: Tensor) -> DrawInputs[Tensor]:
    numbers = tokens.new_zeros((3, tokens.shape[0]), dtype=torch.float32)
    return _inputs_of([*numbers, *tokens.new_zeros((4, tokens.shape[0]))])


def _unfiltered(inputs: DrawInputs[Tensor]) -> DrawInputs[Tensor]:
    """The same draws at temperature 1 and without filters."""
    ones, none = torch.ones_like(inputs.temperature), torch.zeros_like(inputs.top_k)
    return replace(inputs, temperature=ones, top_p=ones, min_p=torch.zeros_like(inputs.min_p), top_k=none)


def _choose(
    logits: Tensor, inputs: DrawInputs[Tensor] | None, *, at: Tensor | None = None, may_ban: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 and the smallest tempered logits that the filters keep, float32, of logits [m, V].

    Row i has the parameters `at`[i], or i. With `may_ban` a logit of -inf is a token that must not be chosen; otherwise
    its row counts as broken.
    """
    columns = [None] * len(_COLUMNS) if inputs is None else [getattr(inputs, name) for name in _COLUMNS]
    return _operator(logits, *columns, at, may_ban)


@torch.library.custom_op("tandem::choose", mutates_args=())
def _operator(
    logits: Tensor,
    temperature: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    top_k: Tensor | None,
    seed: Tensor | None,
    sample_idx: Tensor | None,
    position: Tensor | None,
    at: Tensor | None,
    may_ban: bool,
) -> tuple[Tensor, Tensor]:
    """One operator for torch, so that recorders and fake devices see the same step on every device."""
    if may_ban:
        peaks = logits.amax(-1)
        tokens, usable = logits.argmax(-1), (peaks > -torch.inf) & (peaks < torch.inf)
    else:
        tokens = greedy_tokens(logits)
        usable = tokens >= 0
    floors = logits.new_full((logits.shape[0],), -torch.inf, dtype=torch.float32)
    columns: Any = (temperature, top_p, min_p, top_k, seed, sample_idx, position)
    if temperature is not None:
        drawing = _inputs_of(columns if at is None else [column.index_select(0, at) for column in columns])
        drawn, floors = _drawn(logits, drawing)
        tokens = torch.where(drawing.temperature > 0, drawn, tokens)
    return tokens.masked_fill_(~usable, -1), floors


def _on_gpu(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    # A CPU build of torch comes without Triton.
    from gpu_worker.sampling.choose_kernel import choose_on_gpu

    *columns, at, may_ban = arguments
    return choose_on_gpu(logits, tuple(columns), at, may_ban)


def _shapes(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    num = logits.shape[0]
    return logits.new_empty(num, dtype=torch.int64), logits.new_empty(num, dtype=torch.float32)


_operator.register_kernel("cuda", _on_gpu)
_operator.register_fake(_shapes)


def _inputs_of(columns: Sequence[Tensor]) -> DrawInputs[Tensor]:
    return DrawInputs(**dict(zip(_COLUMNS, columns, strict=True)))


def _drawn(logits: Tensor, inputs: DrawInputs[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the tokens that the samples draw, and the smallest tempered logits that they keep. For a CPU."""
    vocab_size = logits.shape[1]
    tempered = logits.float() / torch.where(inputs.temperature > 0, inputs.temperature, 1)[:, None]
    # As in rank_threshold, so that both paths choose the same tokens.
    peak = tempered.softmax(-1).amax(-1) if vocab_size > SMALL_VOCABULARY else None
    threshold, _ = threshold_within(tempered, inputs.top_k, inputs.top_p, peak, vocab_size)
    floors = torch.maximum(threshold, tempered.amax(-1) + inputs.min_p.log())
    tempered.masked_fill_(tempered < floors[:, None], -torch.inf)
    add_noise(tempered, noise_keys(inputs.seed, inputs.sample_idx, inputs.position))
    return tempered.argmax(-1), floors


# Noise is computed only for the tokens that the filters leave if these are fewer than one in _SPARSE.
_SPARSE = 8


def filtered(logits: Tensor, inputs: SamplingInputs[Tensor]) -> Tensor:
    """Returns tempered logits, float32 [R, V], -inf for removed tokens. Equal logits are kept or removed together."""
    logits = logits / inputs.temperature[:, None]
    if inputs.rank_groups:
        threshold = logits.new_full((logits.shape[0],), -torch.inf)
        for group in inputs.rank_groups:
            if group.places is None:
                threshold = rank_threshold(logits, inputs.top_k, inputs.top_p, few=group.few)
            else:
                top_k, top_p = inputs.top_k[group.places], inputs.top_p[group.places]
                of_group = rank_threshold(logits.index_select(0, group.places), top_k, top_p, few=group.few)
                threshold.index_copy_(0, group.places, of_group)
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    if inputs.filters_min_p:
        # log 0 is -inf: a row without min_p keeps all tokens.
        floor = logits.amax(-1, keepdim=True) + inputs.min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    # In place: the division above made a copy.
    _filter_late(logits, inputs.late)
    return logits


def _add_noise(logits: Tensor, keys: Tensor) -> None:
    """Adds each row's noise to logits [R, V] in place; tokens that a filter removed stay at -inf."""
    if logits.shape[1] > SMALL_VOCABULARY:
        kept = logits > -torch.inf
        if _SPARSE * int(kept.sum()) < logits.numel():
            rows, tokens = kept.nonzero(as_tuple=True)
            logits.index_put_((rows, tokens), logits[kept] + gumbel_noise(keys[rows], tokens))
            return
    add_noise(logits, keys)


def sample(logits: Tensor, inputs: SamplingInputs[Tensor] | None, edited: EditedLogits | None = None) -> Tensor:
    """Returns tokens int64 [S] for logits [S, V], -1 if a row's logits are not all finite or its edits ban every token.

    `inputs` is None if every sample is greedy.
    """
    tokens = greedy_tokens(logits)
    if inputs is None and edited is None:
        return tokens
    usable = tokens >= 0
    if edited is not None:
        best = edited.logits.argmax(-1)
        tokens.index_copy_(0, edited.samples, best)
        possible = edited.logits.gather(1, best[:, None])[:, 0] > -torch.inf
        usable.index_copy_(0, edited.samples, possible & usable.index_select(0, edited.samples))
    if inputs is not None:
        drawing = logits.index_select(0, inputs.rows).float()
        if edited is not None and edited.draws is not None:
            sources, places = edited.draws
            drawing.index_copy_(0, places, edited.logits.index_select(0, sources))
        drawing = filtered(drawing, inputs)
        _add_noise(drawing, noise_keys(inputs.seed, inputs.sample_idx, inputs.position))
        tokens.index_copy_(0, inputs.rows, drawing.argmax(-1))
    return tokens.masked_fill_(~usable, -1)
