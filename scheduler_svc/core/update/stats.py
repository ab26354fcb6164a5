"""Makes the statistics that a request's terminal answer carries. The function is pure."""

from scheduler_svc.core.messages.ends import MAX_COUNT, Stats
from scheduler_svc.core.state.request import Request


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
