"""Makes the requests of an accepted Submit, one per sample, and queues them; ends them when their times are over.

Owns the numbers of requests, which are never used twice, and the rule of the wait for a worker: a request that no
present worker can hold ends after `max_worker_wait_seconds`. Also takes up requests of a journal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.events import Restored, Submit
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.preparations import Preparations
from scheduler_svc.core.queue.request_queue import DeadlineKind, RequestQueue
from scheduler_svc.core.requests.refusals import tokens_to_charge, total_tokens
from scheduler_svc.core.schedule.endings import End, Ending, restored_ending
from scheduler_svc.core.state.request import Phase, Request
from scheduler_svc.core.state.worker_infos import WorkerInfos
from scheduler_svc.core.waits import Waits


@dataclass(slots=True)
class Acceptance:
    """Queues new requests, for which a worker must have been proven, and ends them at their deadlines."""

    _config: CoreConfig
    _queue: RequestQueue
    _lanes: Lanes
    _waits: Waits
    _preparations: Preparations
    _end: End
    _next_handle: int = 1

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
            self._add_deadlines(request, submit, now)
        return first_handle

    def restore(self, restored: Sequence[tuple[int, float, Restored]], now: float) -> list[Ending]:
        """Queues the live samples of restored requests: first handle, time of arrival, event.

        Those that were suspects form one group of suspects. Returns the endings of those that must end at once.
        """
        endings: list[Ending] = []
        suspects: list[Request] = []
        for first_handle, arrived_at, event in restored:
            for request in self._new_requests(event.submit, first_handle, arrived_at, is_restored=True):
                if event.ends[request.sample_idx] is not None:
                    continue
                request.restore(event.outputs[request.sample_idx])
                request.weights.restore(event.weights[request.sample_idx] if event.weights else ())
                self._preparations.accepted(event.submit, 1)
                self._queue.add(request)
                if (account := self._queue.account_of(request)) is not None:
                    # What it may still make: its end gives the rest back.
                    account.charge(request.unmade, now, requests=0)
                self._add_deadlines(request, event.submit, now)
                if (ending := restored_ending(request, self._lanes.worker_infos.known, event.identity)) is not None:
                    endings.append(ending)
                elif request.sample_idx in event.suspects:
                    suspects.append(request)
        if suspects:
            self._lanes.suspects.restore(suspects)
        return endings

    def _new_requests(
        self, submit: Submit, first_handle: int, arrived_at: float, *, is_restored: bool = False
    ) -> list[Request]:
        """Returns one request for each sample. Its handle is also its number in the order of arrival.

        The samples share the prompt and all settings. Only the first one returns prompt logprobs.
        """
        # All workers have the same model identity, which covers the page size and the EOS token ids.
        infos = self._lanes.worker_infos
        info = infos.known[0]
        prompt, maximum = len(submit.prompt), submit.maximum
        total, is_cut = _length(submit, infos, is_restored=is_restored)
        meter = 0
        if submit.tenant and not maximum.is_set:
            meter = self._queue.accounts.of(submit.tenant, arrived_at).number
        hashes = _page_hashes(submit, info.page_size)
        # Of a tenant's own share, each salt gets its part.
        share = submit.prefix_root if self._config.policy.fair_share else b""
        expected = prompt + maximum.expected(total - prompt)
        banned = _banned(submit, info.eos_token_ids)
        stops, options = frozenset(submit.stop_token_ids), submit.options
        prompt_logprobs_from = submit.prompt_logprobs_from if submit.prompt_logprobs_from < prompt else 0
        return [
            Request(
                handle=first_handle + i,
                frontend=submit.frontend,
                stream=stream,
                request_id=submit.request_id,
                prompt=submit.prompt,
                sampling=submit.sampling,
                sample_idx=i,
                num_samples=submit.num_samples,
                total_length=total,
                maximum=maximum,
                meter=meter,
                is_cut=is_cut,
                min_new_tokens=submit.min_new_tokens,
                stop_token_ids=stops,
                banned=banned,
                ignore_eos=submit.ignore_eos,
                num_logprobs=submit.num_logprobs,
                priority=submit.priority,
                arrival=first_handle + i,
                arrived_at=arrived_at,
                ends_at=submit.ends_at(arrived_at),
                virtual_start=self._queue.virtual_start(submit.tenant, share, expected),
                tenant=submit.tenant,
                prefix_root=submit.prefix_root,
                constraint=submit.constraint_hash,
                options=options,
                page_hashes=hashes.copy(),
                cache_read=submit.cache_read,
                cache_write=submit.cache_write,
                lingers=submit.linger_seconds > 0,
                prompt_logprobs_from=0 if i else prompt_logprobs_from,
            )
            for i, stream in enumerate(submit.streams)
        ]

    # Deadlines -----------------------------------------------------------------------------------------------

    def _add_deadlines(self, request: Request, submit: Submit, now: float) -> None:
        """Adds the deadlines of a new request. Its time limits count from its arrival."""
        if submit.max_time_seconds > 0:
            self._queue.add_deadline(request.arrived_at + submit.max_time_seconds, request, DeadlineKind.TIME_LIMIT)
        if submit.deadline_seconds > 0:
            self._queue.add_deadline(request.arrived_at + submit.deadline_seconds, request, DeadlineKind.DEADLINE)
        # A request from the journal that has output has run before.
        if submit.max_queue_seconds > 0 and not request.num_outputs:
            self._queue.add_deadline(request.arrived_at + submit.max_queue_seconds, request, DeadlineKind.QUEUE_TIME)
        self.update_worker_wait(request, now)

    def update_worker_wait(self, request: Request, now: float) -> None:
        """Starts or ends the request's wait for a worker that can hold it."""
        infos = self._lanes.worker_infos
        longest = infos.longest_with_constraints if request.constraint else infos.longest_present
        if request.phase is Phase.RUNNING or request.least_length(request.known) <= longest:
            request.end_worker_wait()
        elif request.begin_worker_wait(now):
            self._queue.add_deadline(now + self._config.max_worker_wait_seconds, request, DeadlineKind.WORKER_WAIT)

    def expire(self, now: float) -> list[fx.Effect]:
        """Ends the requests whose deadlines have passed. Returns what their callers are told of their waits."""
        effects: list[fx.Effect] = []
        while (due := self._queue.pop_deadline(now)) is not None:
            effects += self._expire(*due, now)
        return effects

    def _expire(self, request: Request, due: DeadlineKind, at: float, now: float) -> list[fx.Effect]:
        """Ends a request, if it is due. An error names what the request was waiting for."""
        match due:
            case DeadlineKind.TIME_LIMIT:
                effects = self._waits.last_word(request, now)
                self._end(request, now, reason=fx.EndReason.TIME_LIMIT)
                return effects
            case DeadlineKind.DEADLINE:
                message = f"request {request.request_id}: its deadline passed after {now - request.arrived_at:.3f} s"
                message += self._waits.named(request, now)
                self._end(request, now, failure=fx.Failure(code=fx.FailureCode.DEADLINE, message=message))
            case DeadlineKind.QUEUE_TIME:
                # A preempted request, or one whose worker was lost, has had a row: its caller has waited long enough.
                if request.admitted_at is None:
                    waited = now - request.arrived_at
                    limit = f"the limit is {at - request.arrived_at:.7g} s (max_queue_seconds)"
                    message = f"request {request.request_id}: it waited {waited:.3f} s in the queue; {limit}"
                    message += self._waits.named(request, now)
                    self._end(request, now, failure=fx.Failure(code=fx.FailureCode.DEADLINE, message=message))
            case DeadlineKind.WORKER_WAIT:
                self._end_worker_wait(request, now)
        return []

    def _end_worker_wait(self, request: Request, now: float) -> None:
        """Ends a request if no worker was large enough for `max_worker_wait_seconds`; checks again later if not.

        With an unset maximum, what it has is its answer.
        """
        limit, since = self._config.max_worker_wait_seconds, request.worker_wait_since
        ends_at = request.worker_wait_ends_at(now, limit)
        if since is None or ends_at is None:
            return
        if now < ends_at:
            self._queue.add_deadline(ends_at, request, DeadlineKind.WORKER_WAIT)
            return
        if request.num_outputs and not request.maximum.is_set:
            # It has all that the workers hold.
            self._end(request, now, reason=fx.EndReason.CONTEXT_FULL)
            return
        takes = " and took constraints" if request.constraint else ""
        message = (
            f"for {now - since:.0f} s no worker could hold its {request.size}{takes}; "
            f"the limit is {limit:g} s (max_worker_wait_seconds)"
        )
        message += self._waits.named(request, now)
        self._end(request, now, failure=fx.Failure(code=fx.FailureCode.NO_WORKER, message=message))


def _banned(submit: Submit, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens that may not be sampled before `min_new_tokens`."""
    own = () if submit.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*own, *submit.stop_token_ids))) if submit.min_new_tokens > 0 else ()


def _length(submit: Submit, infos: WorkerInfos, *, is_restored: bool) -> tuple[int, bool]:
    """Returns the length at which a request ends, and whether that is what the workers hold.

    A journal has what was accepted, by workers that may be larger than those that are back.
    """
    prompt, maximum = len(submit.prompt), submit.maximum
    total = wanted = prompt + maximum.tokens
    if not is_restored:
        total = total_tokens(infos, prompt, maximum)
        if not maximum.is_set:
            total = min(total, infos.longest_known)
    return total, total < wanted or (not maximum.is_set and total >= infos.longest_known)


def _page_hashes(submit: Submit, page_size: int) -> list[bytes]:
    """Returns the hashes of the prompt's full pages that came with the request; others are computed when needed."""
    if not submit.prefix_root:
        return []
    count = min(len(submit.page_hashes) // HASH_BYTES, len(submit.prompt) // page_size)
    return [submit.page_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count)]
