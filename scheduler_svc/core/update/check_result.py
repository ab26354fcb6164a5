"""Validates a step's result: it has as many values as its plan asked for, and its tokens are in the vocabulary.

A worker that sends an invalid result must join again, and no part of the result is used.
"""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.messages.arrays import is_within
from scheduler_svc.core.messages.events import ConstraintsOfStep, RawLogprobs, StepDone
from scheduler_svc.core.messages.plan import SentPlan


def is_valid(event: StepDone, record: SentPlan, vocab_size: int) -> bool:
    """Returns whether the result has a valid token for each sampled row, the wanted logprobs and the wanted pool.

    Values of rows with logits that are not finite, and tokens of rows whose constraint failed, are not checked.
    """
    if event.pool_id != record.takes_over:
        return False
    num_sampled = len(record.sampled)
    if len(event.tokens) != num_sampled or not is_within(event.nonfinite, num_sampled):
        return False
    if not _has_wanted_logprobs(record, event, vocab_size):
        return False
    meaningless = event.nonfinite
    if event.constraints is not None:
        if not _fits_constraints(event.constraints, record):
            return False
        meaningless = np.concatenate([meaningless, event.constraints.failed])
    if not len(meaningless):
        return is_within(event.tokens, vocab_size)
    return is_within(np.delete(event.tokens, meaningless), vocab_size)


def _fits_constraints(found: ConstraintsOfStep, record: SentPlan) -> bool:
    """Returns whether only rows with a constraint are named, and none both as complete and as failed."""
    named, constrained = np.concatenate([found.complete, found.failed]), record.constrained
    if constrained is None or not is_within(named, len(constrained)):
        return False
    return bool(constrained[named].all()) and len(np.unique(named)) == len(named)


def _has_wanted_logprobs(record: SentPlan, event: StepDone, vocab_size: int) -> bool:
    """Returns whether the result has exactly the logprobs that its plan asked for.

    Logprobs may be NaN and token ids invalid only for rows with logits that are not finite.
    """
    wanted_pieces, prompt = record.wanted_prompt_logprobs, event.prompt_logprobs
    if record.num_logprobs is None and not wanted_pieces:
        return not len(event.logprobs.logprobs) and not len(prompt.logprobs)
    prompt_top_k = max((piece.top_k for piece in wanted_pieces), default=0)
    ignored = np.flatnonzero(np.isnan(prompt.logprobs)).tolist()
    if not _fits(prompt, sum(piece.count for piece in wanted_pieces), prompt_top_k, vocab_size, ignored):
        return False
    if record.num_logprobs is None:
        return not len(event.logprobs.logprobs)
    is_wanted = record.num_logprobs > 0
    nonfinite = event.nonfinite[is_wanted[event.nonfinite]]
    ignored = (np.cumsum(is_wanted)[nonfinite] - 1).tolist()
    return _fits(event.logprobs, int(is_wanted.sum()), int(record.num_logprobs.max()) - 1, vocab_size, ignored)


def _fits(raw: RawLogprobs, count: int, top_k: int, vocab_size: int, ignored: Sequence[int]) -> bool:
    cells = count * top_k
    if (len(raw.logprobs), len(raw.top_token_ids), len(raw.top_logprobs)) != (count, cells, cells):
        return False
    if not count:
        return True
    ids = raw.top_token_ids
    if np.isnan(np.delete(raw.logprobs, ignored)).any():
        return False
    if len(ignored):
        ids = np.delete(ids.reshape(count, top_k), ignored, axis=0)
    return raw.top_k == top_k and (not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size))
