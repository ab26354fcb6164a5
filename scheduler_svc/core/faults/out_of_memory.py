"""What follows a step that ran out of memory: a smaller step, then fewer rows, then one request alone, then its end.

`MemoryLimit` of the lane decides which. This module resets the lane, counts, and writes the messages. A step that runs
out of memory makes no request a suspect and does not count as a failed step of the worker.
"""

from scheduler_svc.core.limits.memory_limit import Reduction
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.update.endings import Ending
from scheduler_svc.core.workers.lanes import Lanes


class OutOfMemory:
    """Handles results with the status OUT_OF_MEMORY of proven workers."""

    def __init__(self, queue: RequestQueue, lanes: Lanes) -> None:
        self._queue = queue
        self._lanes = lanes

    def handle(
        self, lane: Lane, record: SentPlan, event: ev.StepDone, now: float
    ) -> tuple[list[fx.Effect], list[Ending]]:
        """Lowers the lane's limits and resets the lane. Returns effects and the request that ends, if one does."""
        reduction = lane.memory.ran_out(record)
        self._lanes.counters.memory_reduced(reduction)
        positions, rows = record.prefill_tokens + record.decode_tokens, len(record.rows)
        size = f"{positions:,} positions of {rows:,} {'row' if rows == 1 else 'rows'}"
        what = f"step {record.step} with {size} ran out of memory ({event.detail}); {lane.memory.limits()}"
        if reduction is Reduction.REFUSED:
            what += "; two requests in a row ran out of memory alone"
            return self._lanes.refuse_for_now(lane, what, now, ResetCause.OUT_OF_MEMORY, event.compute_us), []
        what = f"worker {lane.worker}: {what}"
        cause = ResetCause.OUT_OF_MEMORY
        # The pages of confirmed steps stay cached, and the step does not count as a failed one.
        effects = self._lanes.reset(lane, what, now, cause, event.compute_us, keep_pages=True)
        request = self._queue.by_handle(int(record.handles[0])) if reduction is Reduction.ENDED else None
        if request is None:
            return effects, []
        why = (
            f"request {request.request_id}: its worker ran out of memory in two steps in which it ran alone; the last "
            f"had {size}, the sequence has {request.known:,} tokens ({event.detail})"
        )
        return effects, [Ending.failed(request, why)]
