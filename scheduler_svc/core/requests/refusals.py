"""Why a Submit is refused: the state of the service, a quarantine, its own values, the queue, its tenant's rates."""

from scheduler_svc.core.availability import Availability
from scheduler_svc.core.constraints.sources import Sources
from scheduler_svc.core.faults.convictions import Convictions
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.effects import RejectCode, Rejected
from scheduler_svc.core.messages.submit import Submit
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.requests.check_submit import Refusal, refusal, tenant_queue_full, tokens_to_charge
from scheduler_svc.core.workers.lanes import Lanes


class Refusals:
    """Decides whether a Submit is accepted. It changes nothing."""

    def __init__(
        self,
        config: CoreConfig,
        queue: RequestQueue,
        lanes: Lanes,
        availability: Availability,
        convictions: Convictions,
        sources: Sources,
    ) -> None:
        self._config = config
        self._queue = queue
        self._lanes, self._availability = lanes, availability
        self._convictions = convictions
        self._sources = sources

    def rejected(self, event: Submit, now: float, *, is_registered: bool, is_draining: bool) -> Rejected | None:
        """Returns the answer to a request that is refused, None if it is accepted.

        `is_registered`: whether the core knows its front end.
        """
        refused = self._refusal(event, now, is_registered=is_registered, is_draining=is_draining)
        queue, retry_seconds = self._queue, 0.0
        if refused is not None:
            if refused[0] is RejectCode.QUEUE_FULL:
                retry_seconds = queue.drain.seconds(queue.num_waiting, queue.waiting_tokens, now)
        elif event.tenant:
            refused, retry_seconds = self._tenant_refusal(event, now)
        if refused is None:
            return None
        code, field, message = refused
        return Rejected(
            frontend=event.frontend,
            stream=event.stream,
            code=code,
            message=message,
            field=field,
            retry_seconds=retry_seconds,
            tenant_is_full=code is RejectCode.QUEUE_FULL and self._is_full(event.tenant),
        )

    def _tenant_refusal(self, event: Submit, now: float) -> tuple[Refusal | None, float]:
        """Returns the refusal for a limit of the tenant, and in how many seconds it may be accepted."""
        account = self._queue.accounts.of(event.tenant, now)
        count, tokens = event.num_samples, event.num_samples * len(event.prompt)
        if message := tenant_queue_full(event.tenant, count, tokens, self._queue, self._config):
            seconds = account.drain.seconds(account.waiting, account.waiting_tokens, now)
            return (RejectCode.QUEUE_FULL, "", message), seconds
        if (over := account.rate_refusal(tokens_to_charge(event, self._lanes.worker_infos), now)) is not None:
            return (RejectCode.RATE_LIMITED, "", over[0]), over[1]
        return None, 0.0

    def _is_full(self, tenant: str) -> bool:
        """Returns whether the smallest request of the tenant would be refused for want of a place."""
        return bool(tenant) and bool(tenant_queue_full(tenant, 1, 1, self._queue, self._config))

    def _refusal(self, event: Submit, now: float, *, is_registered: bool, is_draining: bool) -> Refusal | None:
        """Returns code, field and message of the refusal, None if the request is accepted."""
        if not is_registered:
            message = "this front end is not registered with the core; it must send Hello first"
            return RejectCode.NOT_READY, "", message
        if self._lanes.worker_infos.served is None:
            return RejectCode.NOT_READY, "", self._availability.why_no_model
        if is_draining:
            return RejectCode.NOT_READY, "", "the service is shutting down"
        if cause := self._lanes.crash_loop.cause(now):
            return RejectCode.NOT_READY, "", cause
        if sentence := self._convictions.quarantine.refusal(event, now):
            return RejectCode.QUARANTINED, "", sentence
        refused = refusal(event, worker_infos=self._lanes.worker_infos, queue=self._queue, config=self._config)
        return refused or (self._of_constraint(event) if event.constraint else None)

    def _of_constraint(self, event: Submit) -> Refusal | None:
        infos, name = self._lanes.worker_infos, event.constraint_hash
        if why := infos.constraint_refusal:
            return RejectCode.INVALID, "constraint", why
        if self._sources.is_other(name, event.constraint):
            return RejectCode.INVALID, "constraint", "the constraint's hash is that of another constraint"
        why = self._sources.refusal(name, event.constraint, event.tenant)
        return (RejectCode.QUEUE_FULL, "constraint", why) if why else None
