"""Whether a step's result may be believed: as many values as its plan asked for, and tokens that there are.

Owns nothing. A worker that answers otherwise is sent away; nothing of its answer is read.
"""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.events import RawLogprobs, StepDone
from scheduler_svc.core.messages.plan import SentPlan


def is_valid(event: StepDone, record: SentPlan, vocab_size: int) -> bool:
    """Whether the result has a token of the vocabulary for each sampled row, and the logprobs asked for.

    What it has for rows that are not finite means nothing.
    """
    num_sampled = len(record.sampled)
    if len(event.tokens) != num_sampled or not _within(event.nonfinite, num_sampled):
        return False
    if not _tells_what_was_asked(record, event, vocab_size):
        return False
    if not len(event.nonfinite):
        return _within(event.tokens, vocab_size)
    return _within(np.delete(event.tokens, event.nonfinite), vocab_size)


def _within(values: Int32Array, limit: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < limit)


def _tells_what_was_asked(record: SentPlan, event: StepDone, vocab_size: int) -> bool:
    """Whether a result tells exactly what its plan asked for.

    Ids beside values that are not finite mean nothing. A token's own logprob is a number where its row is finite.
    """
    asks, prompt = record.wanted_prompt_logprobs, event.prompt_logprobs
    if record.num_logprobs is None and not asks:
        return not len(event.logprobs.logprobs) and not len(prompt.logprobs)
    prompt_top_k = max((wanted.top_k for wanted in asks), default=0)
    meaningless = np.flatnonzero(np.isnan(prompt.logprobs)).tolist()
    if not _fits(prompt, sum(wanted.count for wanted in asks), prompt_top_k, vocab_size, meaningless):
        return False
    if record.num_logprobs is None:
        return not len(event.logprobs.logprobs)
    wanting = record.num_logprobs > 0
    nonfinite = event.nonfinite[wanting[event.nonfinite]]
    lines = (np.cumsum(wanting)[nonfinite] - 1).tolist()
    return _fits(event.logprobs, int(wanting.sum()), int(record.num_logprobs.max()) - 1, vocab_size, lines)


def _fits(told: RawLogprobs, count: int, top_k: int, vocab_size: int, meaningless: Sequence[int]) -> bool:
    cells = count * top_k
    if (len(told.logprobs), len(told.top_token_ids), len(told.top_logprobs)) != (count, cells, cells):
        return False
    if not count:
        return True
    ids = told.top_token_ids
    if np.isnan(np.delete(told.logprobs, meaningless)).any():
        return False
    if len(meaningless):
        ids = np.delete(ids.reshape(count, top_k), meaningless, axis=0)
    return told.top_k == top_k and (not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size))
