"""Makes the requests of an accepted Submit, one per sample, and queues them with their deadlines.

Owns the numbers of requests, which are never used twice. It also takes up requests of a journal.
"""

from collections.abc import Sequence

from scheduler_svc.core.lingering.restored import restore_output, restored_ending
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.submit import Restored, Submit
from scheduler_svc.core.preparations import Preparations
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.requests.check_submit import new_requests, tokens_to_charge
from scheduler_svc.core.requests.deadlines import Deadlines
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.update.endings import Ending
from scheduler_svc.core.workers.lanes import Lanes


class Acceptance:
    """Queues new requests. A worker must have been proven."""

    def __init__(
        self,
        config: CoreConfig,
        queue: RequestQueue,
        lanes: Lanes,
        deadlines: Deadlines,
        preparations: Preparations,
    ) -> None:
        self._config = config
        self._queue = queue
        self._lanes = lanes
        self._deadlines = deadlines
        self._preparations = preparations
        self._next_handle = 1

    def take_handles(self, count: int) -> int:
        """Returns the first of `count` new handles."""
        first, self._next_handle = self._next_handle, self._next_handle + count
        return first

    def accept(self, submit: Submit, now: float) -> int:
        """Queues the samples of a request. Returns the handle of the first one."""
        first_handle = self.take_handles(submit.num_samples)
        if submit.tenant:
            charge = tokens_to_charge(submit, self._lanes.worker_infos)
            self._queue.accounts.of(submit.tenant, now).charge(charge, now)
        self._preparations.accepted(submit, submit.num_samples)
        for request in self._new_requests(submit, first_handle, now):
            self._queue.add(request)
            self._deadlines.begin(request, submit, now)
        return first_handle

    def restore(self, restored: Sequence[tuple[int, float, Restored]], now: float) -> list[Ending]:
        """Queues the live samples of restored requests: first handle, time of arrival, event.

        Those that were suspects form one group of suspects. Returns the endings of those that must end at once.
        """
        endings: list[Ending] = []
        suspects: list[Request] = []
        for first_handle, arrived_at, event in restored:
            for request in self._new_requests(event.submit, first_handle, arrived_at):
                if event.ends[request.sample_idx] is not None:
                    continue
                restore_output(request, event.outputs[request.sample_idx])
                request.weights.restore(event.weights[request.sample_idx] if event.weights else ())
                self._preparations.accepted(event.submit, 1)
                self._queue.add(request)
                if (account := self._queue.account_of(request)) is not None:
                    # What it may still make: its end gives the rest back.
                    account.charge(request.total_length - request.known, now, requests=0)
                self._deadlines.begin(request, event.submit, now)
                if (ending := restored_ending(request, self._lanes.worker_infos.known, event.identity)) is not None:
                    endings.append(ending)
                elif request.sample_idx in event.suspects:
                    suspects.append(request)
        if suspects:
            self._lanes.suspects.restore(suspects)
        return endings

    def _new_requests(self, submit: Submit, first_handle: int, arrived_at: float) -> list[Request]:
        return new_requests(
            submit,
            first_handle=first_handle,
            worker_infos=self._lanes.worker_infos,
            queue=self._queue,
            fair=self._config.policy.fair_share,
            now=arrived_at,
        )
