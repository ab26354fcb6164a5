"""Logits as sampling wants them: biased, penalised, restricted to the tokens that may come out; worker.proto's order.

Owns what happens between the model's logits and temperature, in float32, for exactly the rows that ask. Knows nothing
of plans, filters or noise. Shape legend: S samples, E edited ones, N entries of a ragged list, P penalised rows, L
tokens of the longest, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.sampling.token_history import TokenHistory

# Numbers of each scratch tensor; more rows than fit are worked off in parts.
_MAX_SCRATCH = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """Added to single logits; minus infinity bans."""

    # int64 [N]: which of the E samples, and the token.
    at: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What a row's own tokens cost; all [P]."""

    # Which of the E samples, and the row whose history counts.
    at: Tensor
    rows: Tensor
    # Tokens of the row, and those of them that are its prompt.
    num_known: Tensor
    num_prompt: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    # The largest num_known.
    max_known: int
    # Whether a row has a repetition penalty; a presence or frequency penalty.
    repeats: bool
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Every change to the logits of a step; all tensors are on the device."""

    # int64 [E]: which of the S samples.
    samples: Tensor
    # int64 [n] twice: which of the E samples draw, and their places among those that draw.
    draws: tuple[Tensor, Tensor] | None = None
    biases: Biases | None = None
    penalties: Penalties | None = None
    # int64 [A], [N], [N]: which of the E samples may yield some tokens only, and pairs of these and a token allowed.
    allowed: tuple[Tensor, Tensor, Tensor] | None = None


def edited(logits: Tensor, edits: LogitEdits, history: TokenHistory) -> Tensor:
    """float32 [E, V] of the model's logits [S, V], which stay as they are."""
    # index_select copies, and float() does so only where the dtype differs.
    scores = logits.index_select(0, edits.samples).float()
    if edits.biases is not None:
        at = (edits.biases.at, edits.biases.tokens)
        scores.index_put_(at, edits.biases.values, accumulate=True)
    if edits.penalties is not None:
        _penalise(scores, edits.penalties, history)
    if edits.allowed is not None:
        restricted, at, tokens = edits.allowed
        banned = scores.new_ones((restricted.shape[0], scores.shape[1]), dtype=torch.bool)
        banned.index_put_((at, tokens), banned.new_zeros(()))
        scores.index_copy_(0, restricted, scores.index_select(0, restricted).masked_fill_(banned, -torch.inf))
    return scores


def _penalise(scores: Tensor, penalties: Penalties, history: TokenHistory) -> None:
    num_rows, vocab_size = penalties.at.shape[0], scores.shape[1]
    step = max(1, _MAX_SCRATCH // max(vocab_size, penalties.max_known))
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        tokens = history.read(penalties.rows[part], penalties.max_known)
        chosen = scores.index_select(0, penalties.at[part])
        scores.index_copy_(0, penalties.at[part], _penalised(chosen, tokens, penalties, part))


def _penalised(scores: Tensor, tokens: Tensor, penalties: Penalties, part: slice) -> Tensor:
    """float32 [P, V] of rows whose tokens are int32 [P, L]; every row's result is its own alone."""
    num_rows, vocab_size = scores.shape
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    known = positions < penalties.num_known[part, None]
    # What does not count goes to one more column than there are tokens.
    places = tokens.long().masked_fill_(~known, vocab_size)
    if penalties.repeats:
        seen = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=scores.device)
        seen.scatter_(1, places, True)
        repetition = penalties.repetition[part, None]
        scaled = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen[:, :vocab_size], scaled, scores)
    if penalties.counts:
        places.masked_fill_(positions < penalties.num_prompt[part, None], vocab_size)
        counts = torch.zeros(num_rows, vocab_size + 1, device=scores.device)
        # Sums of ones are exact in any order.
        counts.scatter_add_(1, places, scores.new_ones(()).expand_as(places))
        counts = counts[:, :vocab_size]
        scores = scores - (penalties.frequency[part, None] * counts + penalties.presence[part, None] * (counts > 0))
    return scores
