"""What callers do with requests: `Requests` refuses or queues those of a Submit, one per sample, and ends others early.

Also queues the requests of a journal when a worker is there.
"""

from dataclasses import replace

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.requests.deadlines import add_deadlines
from scheduler_svc.core.requests.lingering import detach, meant
from scheduler_svc.core.requests.refusals import rejected, tokens_to_charge, total_tokens
from scheduler_svc.core.schedule.endings import Ending, restored_ending
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker_infos import WorkerInfos

# To copy a Submit without its hashes takes longer than a tenth of what else a new request takes.
_SMALL_BYTES = 1024


class Requests(Organ):
    @handles(ev.Submit)
    def _submit(self, event: ev.Submit, now: float) -> list[fx.Effect]:
        core = self._core
        if (refused := rejected(core, event, now)) is not None:
            return [refused]
        ahead = core.queue.num_waiting
        first_handle = accept(core, event, now)
        # The effects of forgetting an ended request of the same id.
        forgotten = core.kept.forget(event.request_id)
        if event.lingers:
            core.kept.add(event, first_handle, now)
        core.accepted.record(first_handle, event.request_id, now)
        return [*forgotten, fx.Admitted(frontend=event.frontend, stream=event.stream, requests_ahead=ahead)]

    @handles(ev.Cancel)
    def _cancel(self, event: ev.Cancel, now: float) -> list[fx.Effect]:
        if event.detach:
            entry = self._core.kept.by_reader((event.frontend, event.stream))
            return [] if entry is None else detach(self._core, entry, now)
        request = self._queue.by_stream(event.frontend, event.stream)
        if request is None:
            return []
        self._core.remove(request, now)
        return self._core.kept.canceled(request, now)

    @handles(ev.Finish)
    def _finish(self, event: ev.Finish, now: float) -> list[fx.Effect]:
        request = self._queue.by_stream(event.frontend, event.stream)
        if request is not None:
            self._core.end(request, now, reason=fx.EndReason.STOP_STRING, output_tokens=event.output_tokens)
        return []

    @handles(ev.Abort)
    def _abort(self, event: ev.Abort, now: float) -> list[fx.Effect]:
        outcomes: list[tuple[str, bool]] = []
        effects: list[fx.Effect] = []
        for named in event.request_ids:
            request_id = meant(self._core, named, event.others.get(named, ()))
            samples, kept = self._queue.by_request_id(request_id), self._core.kept.by_id(request_id)
            outcomes.append((named, bool(samples) or (kept is not None and kept.restored is not None)))
            for request in samples:
                self._core.end(request, now, reason=fx.EndReason.ABORTED)
            effects += self._core.kept.forget(request_id)
        return [*effects, fx.AbortReply(frontend=event.frontend, query=event.query, outcomes=tuple(outcomes))]

    @handles(ev.TenantsChanged)
    def _tenants_changed(self, event: ev.TenantsChanged, now: float) -> list[fx.Effect]:
        self._queue.accounts.change(event.limits, now)
        self._queue.unpark_all()
        return []


def accept(core: Core, submit: ev.Submit, now: float) -> int:
    """Queues the samples of a request. Returns the handle of the first one."""
    queue, first_handle = core.queue, core.accepted.take_handles(submit.num_samples)
    if submit.tenant:
        charge = tokens_to_charge(submit, core.lanes.worker_infos)
        queue.accounts.open(submit.tenant, now).charge(charge, now)
    core.sources.accepted(submit, submit.num_samples)
    for request in _new_requests(core, submit, first_handle, now):
        queue.add(request)
        add_deadlines(core, request, submit, now)
    return first_handle


def restore(core: Core, now: float) -> None:
    """Queues the live samples of requests of the journal; those that were suspects form one group of suspects."""
    endings, queue = list[Ending](), core.queue
    suspects: list[Request] = []
    for first_handle, arrived_at, event in core.kept.take_restored():
        for request in _new_requests(core, event.submit, first_handle, arrived_at, is_restored=True):
            if event.ends[request.sample_idx] is not None:
                continue
            request.restore(event.outputs[request.sample_idx])
            request.weights.restore(event.weights[request.sample_idx] if event.weights else ())
            core.sources.accepted(event.submit, 1)
            queue.add(request)
            if (account := queue.account_of(request)) is not None:
                # What it may still make: its end gives the rest back.
                account.charge(request.unmade, now, requests=0)
            add_deadlines(core, request, event.submit, now)
            if (ending := restored_ending(request, core.lanes.worker_infos.known, event.identity)) is not None:
                endings.append(ending)
            elif request.sample_idx in event.suspects:
                suspects.append(request)
    if suspects:
        core.suspects.restore(suspects)
    for ending in endings:
        core.apply(ending, now)


def _new_requests(
    core: Core, submit: ev.Submit, first_handle: int, arrived_at: float, *, is_restored: bool = False
) -> list[Request]:
    """Makes one request for each sample; `arrived_at` is on the core's clock. The handle numbers them by arrival.

    Only the first sample returns prompt logprobs.
    """
    # All workers have the same model identity, which covers the page size and the EOS token ids.
    infos = core.lanes.worker_infos
    info = infos.known[0]
    prompt = len(submit.prompt)
    total, is_cut = _length(submit, infos, is_restored=is_restored)
    meter = 0
    if submit.tenant and submit.is_max_unset:
        meter = core.queue.accounts.open(submit.tenant, arrived_at).number
    hashes = _page_hashes(submit, info.page_size)
    # Each salt gets its part of the tenant's share.
    share = submit.prefix_root if core.config.policy.fair_share else b""
    expected = prompt + submit.expected(total - prompt)
    banned, stops = _banned(submit, info.eos_token_ids), frozenset(submit.stop_token_ids)
    kept = _kept(submit)
    prompt_logprobs_from = submit.prompt_logprobs_from if submit.prompt_logprobs_from < prompt else 0
    return [
        Request(
            handle=first_handle + i,
            submit=kept,
            sample_idx=i,
            frontend=submit.frontend,
            stream=stream,
            total_length=total,
            expected_length=expected,
            meter=meter,
            is_cut=is_cut,
            stops=stops,
            banned=banned,
            arrived_at=arrived_at,
            virtual_start=core.queue.enter(submit.tenant, share, expected),
            needs=tuple(resource.need for resource in submit.resources),
            page_hashes=hashes.copy(),
            prompt_logprobs_from=0 if i else prompt_logprobs_from,
        )
        for i, stream in enumerate(submit.streams)
    ]


def _kept(submit: ev.Submit) -> ev.Submit:
    """Returns what the requests keep of their Submit: without what is large, and is kept and freed elsewhere."""
    if not submit.resources and len(submit.page_hashes) + len(submit.description) <= _SMALL_BYTES:
        return submit
    # The hashes stay: they identify the request.
    resources = tuple(replace(resource, source=b"") for resource in submit.resources)
    return replace(submit, page_hashes=b"", resources=resources, description=b"")


def _banned(submit: ev.Submit, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens that may not be sampled before `min_new_tokens`."""
    eos = () if submit.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*eos, *submit.stop_token_ids))) if submit.min_new_tokens > 0 else ()


def _length(submit: ev.Submit, infos: WorkerInfos, *, is_restored: bool) -> tuple[int, bool]:
    """Returns the length at which a request ends, and whether that is what the workers hold.

    A journal has what was accepted, by workers that may be larger than those that are back.
    """
    total = wanted = len(submit.prompt) + submit.max_new_tokens
    if not is_restored:
        total = total_tokens(infos, submit)
        if submit.is_max_unset:
            total = min(total, infos.longest_known)
    return total, total < wanted or (submit.is_max_unset and total >= infos.longest_known)


def _page_hashes(submit: ev.Submit, page_size: int) -> list[bytes]:
    """Returns the hashes of the prompt's full pages that came with the request; others are computed when needed."""
    if not submit.prefix_root:
        return []
    count = min(len(submit.page_hashes) // HASH_BYTES, len(submit.prompt) // page_size)
    return [submit.page_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count)]
