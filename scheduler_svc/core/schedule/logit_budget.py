"""Logprobs on their way: what a plan asks for, how many a step can tell, and to whom they go.

Owns no state but a step's room. A position whose logits are wanted takes a logit row on the worker: one for each row
that samples, one for each position of a prompt whose logprobs are told. Position p's logprob comes of the logits at
p - 1, so a chunk of positions s to e - 1 tells those of s + 1 to e, as far as they are the prompt's and wanted.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.effects import Logprobs, PromptLogprobs, TokenLogprobs
from scheduler_svc.core.messages.events import RawLogprobs
from scheduler_svc.core.messages.plan import SentPlan, WantedPromptLogprobs
from scheduler_svc.core.state.request import Request

# Before planning -------------------------------------------------------------------------------------------------


class LogitBudget:
    """Logit rows that one step has left for prompts, whoever else samples in it.

    `rows_that_may_sample` bounds the rows of the step, so that what a prompt takes is never missing to another row.
    """

    __slots__ = ("_left",)

    def __init__(self, *, logit_rows: int, rows_that_may_sample: int) -> None:
        self._left = logit_rows - rows_that_may_sample

    def has(self, count: int) -> bool:
        """Whether as many are left: with `chunk_align` of them any prompt gets on."""
        return self._left >= count

    def cut(self, request: Request, start: int, count: int, align: int) -> int:
        """How many of `count` positions from `start` on fit, a multiple of `align` where not all do; takes the room."""
        wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        if len(wanted) > self._left:
            # As far as `left` logprobs reach: with the next position the first one too many would come.
            end = wanted.start + self._left - 1
            count = (end - start) // align * align
            wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        self._left -= len(wanted)
        return count


def wanted_positions(first: int, prompt_tokens: int, start: int, end: int) -> range:
    """Prompt positions that computing positions `start` to `end - 1` tells, where they are wanted from `first` on."""
    if not first:
        return range(0)
    return range(max(first, start + 1), min(end, prompt_tokens - 1) + 1)


def wanted_by_chunk(request: Request, first: int, start: int, end: int) -> WantedPromptLogprobs | None:
    """What a chunk of the request will bring; None: nothing."""
    wanted = wanted_positions(first, request.prompt_tokens, start, end)
    if not wanted:
        return None
    return WantedPromptLogprobs(handle=request.handle, start=wanted.start, count=len(wanted), top_k=request.top_k)


# After the step --------------------------------------------------------------------------------------------------


def entry_logprobs(record: SentPlan, told: RawLogprobs, sampled: npt.NDArray[np.int64]) -> TokenLogprobs | None:
    """Logprobs of the entries that want them; `sampled[i]` is entry i's index into the plan's sampled rows."""
    assert record.num_logprobs is not None
    wanting = record.num_logprobs > 0
    entries = np.flatnonzero(wanting[sampled])
    if not len(entries):
        return None
    lines = (np.cumsum(wanting) - 1)[sampled[entries]]
    table = _table(told)
    values = Logprobs(
        logprobs=table.logprobs[lines], top_token_ids=table.top_token_ids[lines], top_logprobs=table.top_logprobs[lines]
    )
    return TokenLogprobs(entries=entries.astype(np.int32), values=values)


def prompt_piece(ask: WantedPromptLogprobs, request: Request, told: RawLogprobs, line: int) -> PromptLogprobs:
    """The ask's piece, which begins at `line` of what was told, with as many alternatives as it wants."""
    table, span = _table(told), slice(line, line + ask.count)
    values = Logprobs(
        logprobs=table.logprobs[span],
        top_token_ids=table.top_token_ids[span, : ask.top_k],
        top_logprobs=table.top_logprobs[span, : ask.top_k],
    )
    return PromptLogprobs(frontend=request.frontend, stream=request.stream, start=ask.start, values=values)


def _table(told: RawLogprobs) -> Logprobs:
    shape = (len(told.logprobs), told.top_k)
    return Logprobs(
        logprobs=told.logprobs,
        top_token_ids=told.top_token_ids.reshape(shape),
        top_logprobs=told.top_logprobs.reshape(shape),
    )
