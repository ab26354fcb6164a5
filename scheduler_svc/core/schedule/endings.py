"""Which requests end with a step, and why: their tokens, the outcome of their rows. Owns no state.

Also those of an earlier process, as its journal has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.effects import MAX_COUNT, EndReason, Failure, FailureCode, Stats
from scheduler_svc.core.messages.events import StepDone
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.request import Request
from tandem_contract.plural import numbered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ending:
    """A request that ends with a step: normally, with a `reason`, or with a `failure`."""

    request: Request
    reason: EndReason | None = None
    stop_token_id: int | None = None
    failure: Failure | None = None
    outgrew: bool = False
    """It only leaves its worker, which has no room for another token. The maximum is unset."""

    @staticmethod
    def failed(request: Request, message: str) -> "Ending":
        return Ending(request=request, failure=Failure(code=FailureCode.INTERNAL, message=message))

    @staticmethod
    def not_finite(request: Request) -> "Ending":
        what = f"request {request.submit.request_id}: the model's output was not finite; the request was ended"
        return Ending.failed(request, what)


class Outcomes:
    """What a step's result says of its sampled rows besides their tokens."""

    def __init__(self, event: StepDone) -> None:
        num_sampled, self._constraints = len(event.tokens), event.constraints
        self.is_good = np.ones(num_sampled, np.bool_)
        """bool[s]: whether the row's token has a meaning."""
        self.is_good[event.nonfinite] = False
        self.is_complete: npt.NDArray[np.bool_] | None = None
        """bool[s]: whether the token completes the row's constraint. None if none does."""
        if (constraints := event.constraints) is None:
            return
        self.is_good[constraints.failed] = False
        if len(constraints.complete):
            self.is_complete = np.zeros(num_sampled, np.bool_)
            self.is_complete[constraints.complete] = True

    def failure(self, idx: int, request: Request) -> Ending:
        """Returns the ending of a request that got no good token; `idx` is that of its row among the sampled ones."""
        constraints = self._constraints
        if constraints is None or idx not in constraints.failed:
            return Ending.not_finite(request)
        detail = constraints.detail if idx == constraints.failed[0] else ""
        return Ending.failed(request, detail or "the constraint failed")


def ending_of(
    request: Request, token: int, known: int, is_eos: bool, *, is_complete: bool = False, longest: float = inf
) -> Ending | None:
    """Returns the ending that `token` causes, if any. `known` includes it; the worker holds at most `longest` tokens.

    Stop tokens precede a complete constraint (`is_complete`), which precedes the length limit.
    """
    if known > request.prompt_tokens + request.submit.min_new_tokens:
        if token in request.stops:
            return Ending(request=request, reason=EndReason.STOP_TOKEN, stop_token_id=token)
        if is_eos:
            return Ending(request=request, reason=EndReason.EOS, stop_token_id=token)
    if is_complete:
        return Ending(request=request, reason=EndReason.CONSTRAINT_COMPLETE)
    if known == request.total_length:
        return Ending(request=request, reason=EndReason.CONTEXT_FULL if request.is_cut else EndReason.LENGTH)
    return Ending(request=request, outgrew=True) if known >= longest else None


def stats_of(request: Request, *, now: float, output_tokens: int, discarded_tokens: int) -> Stats:
    """Returns the tokens and times of a request that ends at `now`."""
    admitted = now if request.admitted_at is None else request.admitted_at
    first = request.first_token_at
    last = now if request.last_token_at is None else request.last_token_at
    return Stats(
        prompt_tokens=request.prompt_tokens,
        output_tokens=output_tokens,
        discarded_tokens=discarded_tokens,
        recomputed_tokens=min(request.recomputed_tokens, MAX_COUNT),
        cached_prompt_tokens=request.cached_prompt_tokens,
        queue_seconds=admitted - request.arrived_at,
        prefill_seconds=0.0 if first is None else first - admitted,
        first_token_seconds=0.0 if first is None else first - request.arrived_at,
        decode_seconds=0.0 if first is None else last - first,
        total_seconds=now - request.arrived_at,
        preemptions=min(request.preemptions, MAX_COUNT),
        worker_changes=min(request.worker_changes, MAX_COUNT),
        weights=request.weights.of(output_tokens),
    )


def restored_ending(request: Request, infos: Sequence[WorkerInfo], identity: str) -> Ending | None:
    """Returns the ending of a restored request that its tokens have ended already, or that the model cannot hold.

    `infos` are the known workers, which serve the same model, `identity` is the model of the request.
    """
    if identity not in ("", infos[0].identity):
        return Ending.failed(request, f"request {request.submit.request_id}: another model is served after the restart")
    if request.known > request.total_length or int(request.submit.prompt.max()) >= infos[0].vocab_size:
        what = f"its {numbered(request.known, 'token', 'do')} not fit the model that is served after the restart"
        return Ending.failed(request, f"request {request.submit.request_id}: {what}")
    if not request.num_outputs:
        return None
    token = int(request.tokens_between(request.known - 1, request.known)[0])
    is_eos = not request.submit.ignore_eos and token in infos[0].eos_token_ids
    return ending_of(request, token, request.known, is_eos)
