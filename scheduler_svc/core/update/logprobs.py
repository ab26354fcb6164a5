"""Assigns the logprobs of a result to entries of a StepOutput and to prompt positions. The functions are pure."""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.effects import Logprobs, PromptLogprobs, TokenLogprobs
from scheduler_svc.core.messages.events import RawLogprobs
from scheduler_svc.core.messages.plan import SentPlan, WantedPromptLogprobs
from scheduler_svc.core.state.request import Request


def entry_logprobs(record: SentPlan, raw: RawLogprobs, sampled: npt.NDArray[np.int64]) -> TokenLogprobs | None:
    """Returns logprobs for the entries whose requests asked for them, None if none did.

    `sampled` int64[entries] has the index of each entry among the plan's sampled rows.
    """
    assert record.num_logprobs is not None
    is_wanted = record.num_logprobs > 0
    entries = np.flatnonzero(is_wanted[sampled])
    if not len(entries):
        return None
    lines = (np.cumsum(is_wanted) - 1)[sampled[entries]]
    table = _table(raw)
    values = Logprobs(
        logprobs=table.logprobs[lines], top_token_ids=table.top_token_ids[lines], top_logprobs=table.top_logprobs[lines]
    )
    return TokenLogprobs(entries=entries.astype(np.int32), values=values)


def prompt_piece(wanted: WantedPromptLogprobs, request: Request, raw: RawLogprobs, line: int) -> PromptLogprobs:
    """Returns the logprobs of a request's prompt positions, which begin at index `line` of `raw`."""
    table, span = _table(raw), slice(line, line + wanted.count)
    values = Logprobs(
        logprobs=table.logprobs[span],
        top_token_ids=table.top_token_ids[span, : wanted.top_k],
        top_logprobs=table.top_logprobs[span, : wanted.top_k],
    )
    return PromptLogprobs(frontend=request.frontend, stream=request.stream, start=wanted.start, values=values)


def _table(raw: RawLogprobs) -> Logprobs:
    shape = (len(raw.logprobs), raw.top_k)
    return Logprobs(
        logprobs=raw.logprobs,
        top_token_ids=raw.top_token_ids.reshape(shape),
        top_logprobs=raw.top_logprobs.reshape(shape),
    )
