"""What is computed of logits besides tokens: their changes before a token is chosen, and logprobs.

Biases, penalties, allowed tokens and masks are applied in worker.proto's order. They come before temperature, in
float32, only for the rows that request them.

Logprobs of tokens, and of the most probable tokens at their positions, are those of the model's own logits. Of equal
logits the token with the smaller id comes first, as in the greedy choice (`choice.py`): so a greedy token is the first
of the most probable ones. Logits decide and not logprobs, which may be equal where logits are not.

Shape legend: S samples, E samples with changed logits, P rows with penalties, L tokens of the longest row, M rows with
masks, V vocabulary.
"""

import functools

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry
from gpu_worker.sampling.choice import MAX_SCRATCH, parts
from gpu_worker.sampling.inputs import LogitEdits, Penalties, TokenLogprobs

# Elements for logprobs on a CPU: a thread's stay in its cache: a third of the time for 32 rows of 152,000.
_CPU_SCRATCH = 1 << 18


class TokenHistory:
    """An int32 tensor [rows, max_length]. The place of a token is row * max_length + position."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        places = torch.zeros(geometry.history_places, dtype=torch.int32, device=device)
        self._tokens = places.view(-1, geometry.max_length)

    def write(self, places: Tensor, tokens: Tensor) -> None:
        """Writes tokens to places; both int64 [n]."""
        self._tokens.view(-1).index_copy_(0, places, tokens.int())

    def read(self, rows: Tensor, length: int) -> Tensor:
        """Returns the first `length` tokens of `rows`, int32 [rows, length]; unwritten entries are arbitrary."""
        return self._tokens[:, :length].index_select(0, rows)


def edited(logits: Tensor, edits: LogitEdits[Tensor], history: TokenHistory, masks: Tensor | None = None) -> Tensor:
    """Returns the changed logits, float32 [E, V]. The model's logits [S, V] stay unchanged.

    masks: of the rows with masks, uint8 [M, bytes]: bit t, from the lowest bit of byte 0 on, is whether token t is
    allowed. None: they have none here, because another rank chooses their tokens.
    """
    # index_select copies; float() copies only if the dtype differs.
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
    if edits.masked is not None and masks is not None:
        _mask(scores, edits.masked, masks)
    return scores


def _mask(scores: Tensor, masked: Tensor, masks: Tensor) -> None:
    """Removes, in scores [E, V], what the masks do not allow."""
    num_rows, vocab_size = scores.shape
    table = _removals(scores.device)
    for part in parts(masked.shape[0], vocab_size, MAX_SCRATCH):
        # -inf is added where a bit is not set; a lookup per byte is faster than an operation per bit.
        removed = table.index_select(0, masks[part].flatten().int())
        removed = removed.view(-1, 8 * masks.shape[1])[:, :vocab_size]
        if removed.shape[0] == num_rows:
            # All of them, in order.
            scores.add_(removed)
        else:
            scores.index_add_(0, masked[part], removed)


@functools.cache
def _removals(device: torch.device) -> Tensor:
    """What is added to the scores of the eight tokens of each byte of a mask: 0 or -inf, float32 [256, 8]."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, -torch.inf)


def _penalise(scores: Tensor, penalties: Penalties[Tensor], history: TokenHistory) -> None:
    width = max(scores.shape[1], penalties.max_tokens)
    for part in parts(penalties.at.shape[0], width, MAX_SCRATCH):
        tokens = history.read(penalties.rows[part], penalties.max_tokens)
        chosen = scores.index_select(0, penalties.at[part])
        scores.index_copy_(0, penalties.at[part], _penalised(chosen, tokens, penalties, part))


def _penalised(scores: Tensor, tokens: Tensor, penalties: Penalties[Tensor], part: slice) -> Tensor:
    """Returns penalised scores, float32 [P, V], of rows with tokens int32 [P, L]. No row affects another."""
    num_rows, vocab_size = scores.shape
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_token = positions < penalties.num_tokens[part, None]
    # Tokens that do not count go to an extra column, number V.
    places = tokens.long().masked_fill_(~is_token, vocab_size)
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


def logprobs_of(logits: Tensor, tokens: Tensor, top_k: int, rows: Tensor | None = None) -> TokenLogprobs[Tensor]:
    """Returns logprobs of `tokens`, int64 [m], under logits [m, V], or under logits[rows]; the softmax is float32."""
    blocks: list[tuple[Tensor, Tensor, Tensor]] = []
    scratch = min(MAX_SCRATCH, torch.get_num_threads() * _CPU_SCRATCH) if logits.is_cpu else MAX_SCRATCH
    for part in parts(tokens.shape[0], logits.shape[1], scratch):
        wanted = (logits[part] if rows is None else logits.index_select(0, rows[part])).float()
        logprobs, top = wanted.log_softmax(-1), _most_probable(wanted, top_k)
        blocks.append((logprobs.gather(1, tokens[part, None])[:, 0], top.int(), logprobs.gather(1, top)))
    logs, ids, values = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*blocks, strict=True))
    return TokenLogprobs(logprobs=logs, top_token_ids=ids, top_logprobs=values)


def _most_probable(logits: Tensor, top_k: int) -> Tensor:
    """Returns int64 [m, k]: the tokens of the largest of float32 logits [m, V], ordered by logit, then by id.

    Torch's topk leaves the order of equal numbers open, and which of them are among the k. So it gets numbers of which
    no two are equal: the bits of a logit, in an order that integers share, above those of the token.
    """
    if not top_k:
        return logits.new_empty((logits.shape[0], 0), dtype=torch.int64)
    # 0 is added so that the two zeros are one.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)
    return keys.topk(top_k).indices
