"""Logit rows of one step: how many are left for the logprobs of prompts.

Owns the budget of one plan. The worker keeps the logits of a limited number of positions per step: one for each row
that samples, and one for each prompt position whose logprob is wanted. The logprob of position p comes from the logits
at p - 1, so a chunk of positions s to e - 1 brings the logprobs of s + 1 to e, if they are in the prompt and wanted.
"""

from scheduler_svc.core.messages.plan import WantedPromptLogprobs
from scheduler_svc.core.state.request import Request


class LogitBudget:
    """Logit rows that one step has left for prompt logprobs.

    One logit row is set aside for each of `rows_that_may_sample`, so a prompt never takes one that a row needs.
    """

    __slots__ = ("_left",)

    def __init__(self, *, logit_rows: int, rows_that_may_sample: int) -> None:
        self._left = logit_rows - rows_that_may_sample

    def has(self, count: int) -> bool:
        """Whether `count` logit rows are left. With `chunk_align` of them any prompt progresses."""
        return self._left >= count

    def cut(self, request: Request, start: int, count: int, align: int) -> int:
        """Takes logit rows for up to `count` positions from `start` on.

        Returns the number of positions that fit, a multiple of `align` unless all do.
        """
        wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        if len(wanted) > self._left:
            # Up to the position whose logprob is the last one that fits.
            end = wanted.start + self._left - 1
            count = (end - start) // align * align
            wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        self._left -= len(wanted)
        return count


def wanted_positions(first: int, prompt_tokens: int, start: int, end: int) -> range:
    """Prompt positions whose logprobs come from computing `start` to `end - 1`, if wanted from `first` (0: none) on."""
    if not first:
        return range(0)
    return range(max(first, start + 1), min(end, prompt_tokens - 1) + 1)


def wanted_by_chunk(request: Request, first: int, start: int, end: int) -> WantedPromptLogprobs | None:
    """The prompt logprobs that a chunk of the request brings, None if it brings none."""
    wanted = wanted_positions(first, request.prompt_tokens, start, end)
    if not wanted:
        return None
    return WantedPromptLogprobs(handle=request.handle, start=wanted.start, count=len(wanted), top_k=request.top_k)
