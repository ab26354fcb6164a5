"""The wait of a request for a worker that is large enough to hold it, and the failure that ends a long wait."""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.state.request import Phase, Request
from scheduler_svc.core.state.request_queue import DeadlineKind, RequestQueue
from scheduler_svc.core.state.worker_infos import WorkerInfos


def update(request: Request, queue: RequestQueue, worker_infos: WorkerInfos, config: CoreConfig, now: float) -> None:
    """Starts or ends the request's wait, after the known workers changed or the request arrived."""
    if request.phase is Phase.RUNNING or any(info.holds(request.total_length) for info in worker_infos.present):
        request.end_worker_wait()
    elif request.begin_worker_wait(now):
        queue.add_deadline(now + config.max_worker_wait_seconds, request, DeadlineKind.WORKER_WAIT)


def expire(request: Request, queue: RequestQueue, config: CoreConfig, now: float) -> fx.Failure | None:
    """Returns the failure of a request that waited for `max_worker_wait_seconds`; checks again later if it did not."""
    limit, since = config.max_worker_wait_seconds, request.worker_wait_since
    ends_at = request.worker_wait_ends_at(now, limit)
    if since is None or ends_at is None:
        return None
    if now < ends_at:
        queue.add_deadline(ends_at, request, DeadlineKind.WORKER_WAIT)
        return None
    message = (
        f"for {now - since:.0f} s no worker could hold its {request.total_length} tokens (prompt and "
        f"max_new_tokens); the limit is {limit:g} s (max_worker_wait_seconds)"
    )
    return fx.Failure(code=fx.FailureCode.NO_WORKER, message=message)
