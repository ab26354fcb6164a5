"""Why a Submit is refused: the state of the service, a quarantine, its own values, the queue, its tenant's rates.

Nothing here changes state. A request that can never run is refused here, so an accepted request never waits for pages
or positions that cannot exist. A request is accepted with all its samples or not at all.
"""

from scheduler_svc.core.core import Core
from scheduler_svc.core.messages.arrays import is_within
from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.core.messages.effects import RejectCode, Rejected
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.resources import Resource
from scheduler_svc.core.state.worker_infos import WorkerInfos
from tandem_contract.plural import numbered

# Code, field, message.
Refusal = tuple[RejectCode, str, str]


def total_tokens(worker_infos: WorkerInfos, event: Submit) -> int:
    """Returns the length in tokens at which the request ends; 0 if no worker can run it.

    Each known worker gives a length: prompt and maximum, cut at its max_length. Workers with a pool too small for that
    length are left out, unless the maximum is unset: then a full pool ends the request (`rows`). The result is the
    largest of the rest.
    """
    prompt, longest = len(event.prompt), 0
    for info in worker_infos.known:
        total = min(prompt + event.max_new_tokens, info.max_length)
        if total > max(prompt, longest) and (info.holds(total) or event.is_max_unset):
            longest = total
    return longest


def _needed(event: Submit, worker_infos: WorkerInfos) -> int:
    """Returns the length that a worker must hold to run the request; 0 if no known one does."""
    if not event.is_max_unset:
        return total_tokens(worker_infos, event)
    least = len(event.prompt) + max(1, event.min_new_tokens)
    return least if any(info.holds(least) for info in worker_infos.known) else 0


def _too_large(event: Submit, worker_infos: WorkerInfos) -> Refusal | None:
    """Returns the refusal of a request that no worker can run to its end.

    Returns None if a present worker can, or if no worker is present and a recent one could. If only
    a worker that left recently could hold the request, it is refused as NOT_READY, not as invalid.
    """
    prompt, total = len(event.prompt), _needed(event, worker_infos)
    # What the caller has set, or the one token that every request has.
    new, field = event.max_new_tokens, "max_new_tokens"
    if event.is_max_unset:
        new, field = max(1, event.min_new_tokens), "min_new_tokens" if event.min_new_tokens > 1 else ""
    # Some known worker holds it.
    if total and (total <= worker_infos.longest_present or not worker_infos.present):
        return None
    if total:
        reason = (
            f"prompt ({numbered(prompt, 'token')}) and {field or 'one output token'} make {numbered(total, 'token')}; "
            f"the present workers hold at most {worker_infos.longest_present}; a larger one left a short while ago"
        )
        return RejectCode.NOT_READY, "", reason
    # The message gives the limits of the present workers, if there are any.
    info = max(worker_infos.present or worker_infos.recent, key=lambda info: (info.max_length, info.usable_pages))
    if prompt >= info.max_length:
        reason = f"the prompt and one output token make {prompt + 1} tokens; the limit is {info.max_length}"
        return RejectCode.INVALID, "token_ids", reason
    new = min(new, info.max_length - prompt)
    pages = info.pages_at_once(prompt + new - 1)
    reason = (
        f"prompt ({numbered(prompt, 'token')}) and {f'{field} ({new})' if field else 'one output token'} take "
        f"{numbered(pages, 'page')} of {numbered(info.page_size, 'token')}; the pool has {info.usable_pages}"
    )
    return RejectCode.INVALID, f"stop.{field}" if field else "token_ids", reason


def _invalid(core: Core, event: Submit) -> Refusal | None:
    """Returns the refusal of a request that would be invalid even with an empty queue."""
    prompt, samples, info, config = len(event.prompt), event.num_samples, core.lanes.worker_infos.known[0], core.config
    limit = min(MAX_NUM_SAMPLES, config.max_waiting)
    if samples > limit:
        return RejectCode.INVALID, "sampling.num_samples", f"num_samples is {samples}; the limit is {limit}"
    if samples * prompt > config.max_waiting_tokens:
        limit = f"at most {numbered(config.max_waiting_tokens, 'token')} may wait (max_waiting_tokens)"
        if samples == 1:
            return RejectCode.INVALID, "token_ids", f"the prompt has {numbered(prompt, 'token')}; {limit}"
        of_each = f"num_samples is {samples} and the prompt has {numbered(prompt, 'token')}"
        message = f"{of_each}, {samples * prompt} together; {limit}"
        return RejectCode.INVALID, "sampling.num_samples", message
    if not is_within(event.prompt, info.vocab_size):
        return RejectCode.INVALID, "token_ids", f"a token id is outside 0 to {info.vocab_size - 1}"
    return None


def _queue_full(core: Core, event: Submit) -> str:
    """Returns one sentence if the queue has no room for the request now, otherwise ''."""
    queue, config = core.queue, core.config
    prompt, samples, limit = len(event.prompt), event.num_samples, config.max_waiting
    token_limit = config.max_waiting_tokens
    if queue.accounts.has_own_place(event.tenant, samples, samples * prompt, limit, token_limit):
        return ""
    if queue.num_waiting + samples > limit:
        more = f" and num_samples is {samples}" if samples > 1 else ""
        return f"{numbered(queue.num_waiting, 'request', 'are')} waiting{more}; the limit is {limit}"
    if queue.waiting_tokens + samples * prompt > token_limit:
        per_sample = f" for each of {samples} samples" if samples > 1 else ""
        waiting = numbered(queue.waiting_tokens, "token", "are")
        return f"{waiting} waiting and the prompt has {prompt}{per_sample}; the limit is {token_limit}"
    return ""


def _tenant_queue_full(core: Core, tenant: str, count: int, tokens: int) -> str:
    """Returns one sentence if the tenant has too much of the queue for this request, otherwise ''.

    count: the samples of the request. tokens: the prompt's in all samples.
    """
    queue, account = core.queue, core.queue.accounts.of(tenant)
    limits = core.config.max_waiting, core.config.max_waiting_tokens
    if message := account.queue_refusal(count, tokens, *limits):
        return message
    if not queue.accounts.is_shared or queue.accounts.has_own_place(tenant, count, tokens, *limits):
        return ""
    free = limits[0] - queue.num_waiting, limits[1] - queue.waiting_tokens
    return account.crowds_others(count, tokens, *free)


def tokens_to_charge(event: Submit, worker_infos: WorkerInfos) -> int:
    """Returns the tokens that a request is charged for when it is accepted: its prompt, and the longest output of each
    sample unless the maximum is unset."""
    return len(event.prompt) if event.is_max_unset else expected_tokens(event, worker_infos)


def expected_tokens(event: Submit, worker_infos: WorkerInfos) -> int:
    """Returns the tokens that a request is expected to cost its tenant at most."""
    prompt = len(event.prompt)
    return prompt + event.num_samples * event.expected(total_tokens(worker_infos, event) - prompt)


def rejected(core: Core, event: Submit, now: float) -> Rejected | None:
    """Returns the answer to a request that is refused, None if it is accepted."""
    refused = _refusal(core, event, now)
    queue, retry_seconds = core.queue, 0.0
    if refused is not None:
        if refused[0] is RejectCode.QUEUE_FULL:
            retry_seconds = queue.drain.seconds(queue.num_waiting, queue.waiting_tokens, now)
    elif event.tenant:
        refused, retry_seconds = _tenant_refusal(core, event, now)
    if refused is None:
        return None
    code, field, message = refused
    # Whether the smallest request of the tenant would be refused for want of a place, too.
    is_full = code is RejectCode.QUEUE_FULL and bool(event.tenant and _tenant_queue_full(core, event.tenant, 1, 1))
    return Rejected(
        frontend=event.frontend,
        stream=event.stream,
        code=code,
        message=message,
        field=field,
        retry_seconds=retry_seconds,
        tenant_is_full=is_full,
    )


def _tenant_refusal(core: Core, event: Submit, now: float) -> tuple[Refusal | None, float]:
    """Returns the refusal for a limit of the tenant, and in how many seconds it may be accepted."""
    account = core.queue.accounts.of(event.tenant, now)
    if message := _tenant_queue_full(core, event.tenant, event.num_samples, event.num_samples * len(event.prompt)):
        seconds = account.drain.seconds(account.waiting, account.waiting_tokens, now)
        return (RejectCode.QUEUE_FULL, "", message), seconds
    expected, is_unset = expected_tokens(event, core.lanes.worker_infos), event.is_max_unset
    if (over := account.rate_refusal(expected, now, is_expected=is_unset)) is not None:
        return (RejectCode.RATE_LIMITED, "", over[0]), over[1]
    return None, 0.0


def _refusal(core: Core, event: Submit, now: float) -> Refusal | None:
    """Returns code, field and message of the refusal, None if the request is accepted."""
    if message := _not_ready(core, event, now):
        return RejectCode.NOT_READY, "", message
    if sentence := core.quarantine.refusal(event, now):
        return RejectCode.QUARANTINED, "", sentence
    queue = core.queue
    if queue.by_request_id(event.request_id) or any(queue.by_stream(event.frontend, one) for one in event.streams):
        return RejectCode.DUPLICATE, "request_id", f"request_id {event.request_id!r} is live already"
    if refused := _too_large(event, core.lanes.worker_infos) or _invalid(core, event):
        return refused
    if message := _queue_full(core, event):
        return RejectCode.QUEUE_FULL, "", message
    return next(filter(None, (_of(core, resource, event) for resource in event.resources)), None)


def _not_ready(core: Core, event: Submit, now: float) -> str:
    """Returns one sentence if no request is accepted now, otherwise ''."""
    if event.frontend not in core.frontends:
        return "this front end is not registered with the core; it must send Hello first"
    if core.lanes.worker_infos.served is None:
        return core.availability.why_no_model
    return "the service is shutting down" if core.is_stopping else core.lanes.crash_loop.cause(now)


def _of(core: Core, resource: Resource, event: Submit) -> Refusal | None:
    served, kind = core.lanes.worker_infos.served, resource.kind
    if served is not None and (why := served.refusals[kind]):
        return RejectCode.INVALID, kind, why
    if core.sources.is_other(resource):
        return RejectCode.INVALID, kind, f"the {kind}'s hash is that of another {kind}"
    why = core.sources.refusal(resource, event.tenant)
    return (RejectCode.QUEUE_FULL, kind, why) if why else None
