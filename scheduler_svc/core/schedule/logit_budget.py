"""Limits the prompt logprobs of one step by the number of logit rows.

The worker computes logits for a limited number of positions per step (`WorkerInfo.logit_rows`): one logit row for each
row that samples, and one for each prompt position whose logprob is wanted. The logprob of position p comes from the
logits at p - 1, so a chunk of positions s to e - 1 gives the logprobs of s + 1 to e, if they are in the prompt and
wanted.
"""

from scheduler_svc.core.messages.plan import WantedPromptLogprobs
from scheduler_svc.core.state.request import Request


class LogitBudget:
    """Number of logit rows that one step has left for prompt logprobs.

    One logit row is reserved for each of `rows_that_may_sample`.
    """

    __slots__ = ("_left",)

    def __init__(self, *, logit_rows: int, rows_that_may_sample: int) -> None:
        self._left = logit_rows - rows_that_may_sample

    def has(self, count: int) -> bool:
        """Returns whether `count` logit rows are left; with `chunk_align` left, a chunk of any prompt fits."""
        return self._left >= count

    def take(self, request: Request, start: int, count: int, align: int) -> int:
        """Takes the logit rows for a chunk of up to `count` positions from `start` on.

        Returns the number of positions for which they suffice: `count`, or a smaller multiple of `align`.
        """
        wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        if len(wanted) > self._left:
            # The chunk ends at the position whose logprob takes the last logit row.
            end = wanted.start + self._left - 1
            count = (end - start) // align * align
            wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        self._left -= len(wanted)
        return count


def wanted_positions(first: int, prompt_tokens: int, start: int, end: int) -> range:
    """Returns the positions whose logprobs a chunk of `start` to `end - 1` gives. `first` is the first wanted, or 0."""
    if not first:
        return range(0)
    return range(max(first, start + 1), min(end, prompt_tokens - 1) + 1)


def wanted_by_chunk(request: Request, first: int, start: int, end: int) -> WantedPromptLogprobs | None:
    """Returns the prompt logprobs that a chunk of the request gives, None if it gives none."""
    wanted = wanted_positions(first, request.prompt_tokens, start, end)
    if not wanted:
        return None
    return WantedPromptLogprobs(handle=request.handle, start=wanted.start, count=len(wanted), top_k=request.top_k)
