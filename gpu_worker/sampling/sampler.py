"""Chooses tokens from logits on a CPU, where only the rows that draw are filtered; a GPU takes `dense.py`.

The filters are applied in the order temperature, top-k, top-p, min-p, typical-p, as in Transformers. Noise is a pure
function of (seed, sample, position, token), so a token depends neither on the rest of the batch nor on how often the
step runs. Shape legend: S samples, R samples that draw, E samples with changed logits, G some of the R, V vocabulary.
"""

import torch
from torch import Tensor

from gpu_worker.sampling.dense import EditedLogits
from gpu_worker.sampling.greedy import greedy_tokens
from gpu_worker.sampling.inputs import SamplingInputs
from gpu_worker.sampling.noise import add_noise, gumbel_noise, noise_keys
from gpu_worker.sampling.thresholds import MAX_SCRATCH, SMALL_VOCABULARY, rank_threshold, typical

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
                own = rank_threshold(logits.index_select(0, group.places), top_k, top_p, few=group.few)
                threshold.index_copy_(0, group.places, own)
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    if inputs.filters_min_p:
        # log 0 is -inf: a row without min_p keeps all tokens.
        floor = logits.amax(-1, keepdim=True) + inputs.min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if inputs.typical is not None:
        places, typical_p = inputs.typical
        step = max(1, MAX_SCRATCH // logits.shape[1])
        for first in range(0, places.numel(), step):
            part = slice(first, first + step)
            own = logits.index_select(0, places[part])
            # In place: the division above made a copy.
            logits.index_copy_(0, places[part], typical(own, typical_p[part]))
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
