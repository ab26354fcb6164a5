"""Text lines about a service: its health, its load, its model.

Owns units and wording. JSON output uses the names and values of `types` instead.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem_client import types
from tandem_client.cli.plain import plain
from tandem_contract.plural import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the service computes a request that arrives now."""

    # Unreachable: the health check had no answer.
    state: Literal["serving", "not_serving", "unreachable"]
    # Why the service does not serve, or why its load is unknown; otherwise empty.
    reason: str
    # None if GetLoad did not answer.
    load: types.Load | None = None

    def as_dict(self) -> dict[str, object]:
        """The fields of `tandem health --json`; those of the load are None if it is unknown."""
        names = ("workers", "waiting", "suspects", "worker_lost_seconds", "worker_lost_reason", "journal_suspended",
            "not_serving_reason", "not_serving_since")  # fmt: skip
        values = {name: getattr(self.load, name, None) for name in names}
        # None if no worker was lost.
        values["worker_lost_reason"] = values["worker_lost_reason"] or None
        return {"state": self.state, "reason": self.reason, **values}


def of_health(health: Health) -> str:
    """Returns one line: "serving; 2 workers, 3 requests wait" or "not serving for 12 s: ..., 3 requests wait"."""
    load = health.load
    waiting = counted(load.waiting, "request", "wait") if load and load.waiting else ""
    if health.state != "serving":
        since = _since(load.not_serving_since if load else None)
        return f"not serving{since}: {health.reason}{'; ' if waiting else ''}{waiting}"
    if load is None:
        return f"serving; the load is not known: {health.reason}"
    parts = [counted(load.workers, "worker"), *([waiting] if waiting else [])]
    if load.suspects:
        parts.append(f"{counted(load.suspects, 'request')} suspected of killing a worker")
    suspended = f"; {load.journal_suspended}" if load.journal_suspended else ""
    return f"serving; {', '.join(parts)}{suspended}"


def of_quarantined(request: types.QuarantinedRequest) -> Iterator[str]:
    """Yields two lines: the key with id and times, and what the request did."""
    ends = f"{_duration(request.age_seconds)} ago, for another {_duration(request.expires_seconds)}"
    yield f"{request.key}  {request.request_id}, tenant {request.tenant}, {ends}"
    yield f"    {request.cause}"


_MAX_WIDTH, _MAX_TENANT = 80, 16


def of_requests(requests: Sequence[types.ListedRequest], *, is_cut: bool) -> Iterator[str]:
    """Yields a table, a line for each sample, and the totals; with long ids two lines. `is_cut`: there are others."""
    names = [plain(request.abort_id) for request in requests]
    rows = [_request(request) for request in requests]
    head = ("TENANT", "AGE", "TOKENS", "STATE")
    if not any(request.tenant for request in requests):
        head, rows = head[1:], [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    wide = max(map(len, names))
    is_short = wide + 2 + max(map(len, lines)) <= _MAX_WIDTH
    for name, line in zip(("ID", *names), lines, strict=True):
        yield f"{name:{wide}}  {line}" if is_short else f"{name}\n    {line}"
    yield _totals(requests, is_cut=is_cut)


def _request(request: types.ListedRequest) -> tuple[str, str, str, str]:
    tenant = plain(request.tenant)
    tenant = tenant if len(tenant) <= _MAX_TENANT else f"{tenant[: _MAX_TENANT - 1]}…"
    of = f"/{request.max_new_tokens}" if request.max_new_tokens else ""
    state = str(request.state)
    if request.wait_reason is not None:
        state += f": {request.wait_reason.replace('_', ' ')}"
    parts = [state]
    if request.num_samples > 1:
        parts.append(f"sample {request.sample_idx + 1}/{request.num_samples}")
    if request.is_detached:
        parts.append("no reader")
    return tenant, _duration(request.age_seconds), f"{request.output_tokens}{of}", ", ".join(parts)


def _totals(requests: Sequence[types.ListedRequest], *, is_cut: bool) -> str:
    count = len({(request.tenant, request.request_id) for request in requests})
    samples = f" ({counted(len(requests), 'sample')})" if len(requests) > count else ""
    states = Counter(str(request.state) for request in requests)
    tokens = counted(sum(request.output_tokens for request in requests), "output token")
    others = "; there are others (--limit)" if is_cut else ""
    counts = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items(), reverse=True))
    return f"{counted(count, 'request')}{samples}: {counts}; {tokens}{others}"


def of_load(load: types.Load) -> Iterator[str]:
    """Yields six lines, and one more for each worker after the first."""
    if load.not_serving:
        yield f"not serving{_since(load.not_serving_since)}: {load.not_serving}"
    tokens = f" ({counted(load.waiting_tokens, 'token')})" if load.waiting else ""
    yield f"requests  {load.running:,} running, {load.waiting:,} waiting{tokens}"
    host = f"; host memory {_pages(load.host_pages_used, load.host_pages_total)}" if load.host_pages_total else ""
    yield f"pages     {_pages(load.pages_used, load.pages_total)}, {load.pages_cached:,} cached{host}"
    rate = f"hit rate {load.hit_rate:.0%}".replace("%", " %")
    yield f"cache     {rate} of {counted(load.prompt_tokens, 'prompt token')}"
    pace = f"{load.step_ms:{',.0f' if load.step_ms >= 10 else '.2g'}} ms a step" if load.steps else "no step yet"
    yield f"steps     {pace}; {load.steps:,} since start, {counted(load.output_tokens, 'output token')}"
    resets = counted(load.lane_resets, "lane reset")
    suspects = f"; {counted(load.suspects, 'suspect')} on trial" if load.suspects else ""
    yield f"events    {counted(load.preemptions, 'preemption')}, {resets} since start{suspects}"
    workers = [_worker(worker, alone=len(load.per_worker) == load.workers == 1) for worker in load.per_worker]
    if len(workers) == load.workers == 1:
        yield f"workers   1 ({workers[0]})"
    else:
        on_standby = f", and {load.standby_workers:,} on standby" if load.standby_workers else ""
        yield f"workers   {load.workers:,}{on_standby}"
        yield from (f"          {worker}" for worker in workers)
    if load.weights_version:
        others = {worker.weights_version for worker in load.per_worker} - {load.weights_version}
        partly = "; workers have others, as tandem load --json shows" if others else ""
        yield f"weights   version {load.weights_version}{partly}"
    yield from _held_pools(load.held_pools)
    yield from _incidents(load.incidents)
    if load.worker_lost_seconds is not None:
        why = f": {load.worker_lost_reason}" if load.worker_lost_reason else ""
        yield f"lost      last worker lost {_duration(load.worker_lost_seconds)} ago{why}"
    if load.journal_suspended:
        yield f"journal   suspended: {load.journal_suspended}"
    elif load.journal_bytes:
        yield f"journal   {counted(load.journal_bytes, 'byte')}"


def _held_pools(held: types.HeldPools) -> Iterator[str]:
    """Yields a line about the pools that outlive their workers, if a worker with such a pool was lost."""
    size = f" ({held.bytes / 1e6:,.0f} MB)" if held.bytes else ""
    parts = (
        (held.pools, f"{counted(held.pools, 'pool')}{size} of lost workers held, {counted(held.pages, 'cached page')}"),
        (held.taken_over, f"{held.taken_over:,} taken over since start, {counted(held.pages_kept, 'page')} kept"),
        (held.damaged_pages, counted(held.damaged_pages, "damaged page")),
    )
    if said := "; ".join(words for number, words in parts if number):
        yield f"held      {said}"


def _incidents(incidents: types.Incidents) -> Iterator[str]:
    """Yields lines for hung workers and steps out of memory, if there were any."""
    if incidents.hung_workers:
        yield f"hung      {counted(incidents.hung_workers, 'worker')} given up since start"
    counts = {
        "smaller steps": incidents.smaller_steps,
        "fewer rows": incidents.fewer_rows,
        "a request alone": incidents.alone,
        "a request ended": incidents.ended_for_memory,
        "a worker refused": incidents.workers_refused_for_memory,
    }
    if any(counts.values()):
        parts = ", ".join(f"{what} {count:,}" for what, count in counts.items() if count)
        yield f"memory    after steps that ran out of it: {parts}"


def of_model(model: types.ModelInfo) -> Iterator[str]:
    """Yields the limits of requests, and the defaults of options that a request leaves out."""
    tokenizer = "with a tokenizer" if model.has_tokenizer else "no tokenizer: requests give token ids"
    eos = ", ".join(map(str, model.eos_token_ids)) or "none"
    yield f"model       {model.model} ({model.identity})"
    yield f"vocabulary  {counted(model.vocab_size, 'token')}, {tokenizer}; end of sequence: {eos}"
    yield f"length      {counted(model.max_length, 'token')}, prompt and output together"
    most = model.default_max_new_tokens
    rest = "the rest of the context" if most is None else counted(most, "token")
    yield f"output      {rest} without --max-new-tokens"
    yield (
        f"limits      {counted(model.max_num_samples, 'sample')} and {counted(model.max_logprobs, 'logprob')} a request"
    )
    if (limits := model.limits) is not None:
        yield f"stops       {counted(limits.max_stop_strings, 'string')}, {counted(limits.max_stop_token_ids, 'token')}"
        yield (
            f"message     {counted(limits.max_message_bytes, 'byte')}; "
            f"priority {limits.min_priority} to {limits.max_priority}"
        )
    yield f"defaults    {_defaults(model.sampling_defaults)}"
    yield f"batch       {counted(model.max_rows, 'sequence')} at once, {counted(model.token_budget, 'token')} a step"
    yield f"memory      {counted(model.num_pages, 'page')} of {counted(model.page_size, 'token')}"
    yield f"queue       {counted(model.max_waiting, 'request')} may wait"
    if model.window:
        sinks = f" and the first {model.sink_tokens:,}" if model.sink_tokens else ""
        yield f"attention   the last {counted(model.window, 'token')}{sinks}"


def of_progress(progress: types.DrainProgress | types.UpdateProgress) -> str:
    """Returns one line: time, state, what is done and left, what happens."""
    requests = f"{progress.running:,} running, {progress.waiting:,} waiting"
    if isinstance(progress, types.UpdateProgress):
        parts = [f"{progress.workers_updated} of {counted(progress.workers, 'worker')} updated", requests]
    else:
        here = f"{counted(progress.worker_running, 'request')} here, {progress.moved:,} moved"
        parts = [here if progress.worker else requests, f"about {counted(progress.tokens_left, 'token')} left"]
    state = progress.state.replace("_", " ")
    return "  ".join([f"{progress.seconds:7.2f} s  {state:11}", *parts, progress.detail])


# The states of workers that take no requests, and have none or keep them paused.
_STATES = {
    types.WorkerState.STARTING: "starting",
    types.WorkerState.LOADING: "loading weights",
    types.WorkerState.REFUSED: "cannot load the weights",
}


def _worker(worker: types.WorkerLoad, *, alone: bool) -> str:
    # A worker on another host has no process id here.
    place = f"pid {worker.pid}" if worker.pid else worker.name
    name = ", ".join(filter(None, (place, worker.device))) or "pid unknown"
    if alone:
        return name
    if worker.state in _STATES:
        return f"{name}: {worker.detail or _STATES[worker.state]}"
    if worker.is_standby:
        return f"{name}: on standby"
    pages = _pages(worker.pages_used, worker.pages_total)
    state = "draining, " if worker.is_draining else ""
    wrong = f"; {worker.detail}" if worker.detail else ""
    return f"{name}: {state}{worker.running:,} running, {pages}, {worker.pages_cached:,} cached{wrong}"


def _defaults(sampling: types.SamplingDefaults) -> str:
    """Returns the settings that are not neutral."""
    # Imported only here, because it brings protobuf, which no --help needs.
    from tandem_client.wire.parts import SAMPLING

    values = {name: getattr(sampling, name) for name in SAMPLING if name != "seed"}
    kept = {name: value for name, value in values.items() if name == "temperature" or value != SAMPLING[name][1]}
    return ", ".join(f"{name.replace('_', ' ').replace('top ', 'top-')} {value:g}" for name, value in kept.items())


def _pages(used: int, total: int) -> str:
    share = f"{used / total:.0%}".replace("%", " %") if total else "0 %"
    return f"{used:,} of {counted(total, 'page')} ({share})"


def _since(since: float | None) -> str:
    """Returns for how long, by this machine's clock, which may be another one than the service's."""
    return "" if since is None else f" for {_duration(max(0.0, time.time() - since))}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
