"""Translates messages of frontend.proto to the core's events, and the core's effects to frames.

Owns no state. Front ends validate requests for their callers. This module checks only what could harm the core.
"""

from typing import Any

from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.effects import Wait
from scheduler_svc.core.messages.names import meant
from scheduler_svc.core.messages.operators import (
    MAX_OPERATION_SECONDS,
    MAX_PAGE_SIZE,
    MAX_WORKER_NAME_CHARS,
    ClearQuarantine,
    QuarantineEntry,
    QuarantineQuery,
    QuarantineReply,
    RequestsMark,
    RequestsQuery,
    RequestsReply,
    Running,
    UpdateWeights,
    Weights,
)
from scheduler_svc.core.messages.reports import (
    DrainReport,
    HeldPoolsLoad,
    Incidents,
    Load,
    RequestEntry,
    RequestState,
    WaitReason,
    WeightsReport,
    WorkerLoad,
    WorkerState,
)
from scheduler_svc.wire.arrays import WireError, fields, packed
from scheduler_svc.wire.request import fill_end, resume_of, submit_of
from scheduler_svc.wire.worker import weights_of

# The members of these enums have the same names on both sides.
_REJECT = {code: pb.RejectCode.Value(f"REJECT_CODE_{code.name}") for code in fx.RejectCode}
_WAIT = {reason: inference_pb2.WaitReason.Value(f"WAIT_REASON_{reason.name}") for reason in WaitReason}
_WORKER = {state: control_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState}
_REQUEST = {state: control_pb2.RequestState.Value(f"REQUEST_STATE_{state.name}") for state in RequestState}
_REQUEST_OF = {number: state for state, number in _REQUEST.items()}
_RUNNING = {control_pb2.RunningRequests.Value(f"RUNNING_REQUESTS_{each.name}"): each for each in Running}

# The fields that have the same names and values on both sides.
_LOAD = tuple(name for name in Load.__slots__ if name not in ("per_worker", "incidents", "held_pools"))
_WORKER_LOAD = tuple(name for name in WorkerLoad.__slots__ if name != "state")
_ENTRY = tuple(name for name in RequestEntry.__slots__ if name not in ("state", "wait_reason"))
_STATUS = tuple(name for name in fx.CoreStatus.__slots__ if name not in ("frontend", "reason"))
_WAIT_FIELDS = tuple(name for name in Wait.__slots__ if name != "reason")

DEFAULT_UPDATE_SECONDS = 600.0
_QUERIES = {"load_query": ev.LoadQuery, "flush_cache": ev.FlushCache, "quarantine_query": QuarantineQuery}


def event_of(message: pb.FrontendToCore, frontend: str) -> ev.Event:
    """Returns the core's event for the message. Raises WireError if a field is out of bounds."""
    match message.WhichOneof("message"):
        case "hello":
            return ev.FrontendJoined(frontend=frontend)
        case "submit":
            return submit_of(message.submit, frontend)
        case "cancel":
            return ev.Cancel(frontend=frontend, stream=message.cancel.stream, detach=message.cancel.detach)
        case "resume":
            return resume_of(message.resume, frontend)
        case "finish":
            return ev.Finish(
                frontend=frontend, stream=message.finish.stream, output_tokens=message.finish.output_tokens
            )
        case "abort":
            return _abort_of(message.abort, frontend)
        case "load_query" | "flush_cache" | "quarantine_query" as kind:
            return _QUERIES[kind](frontend=frontend, query=getattr(message, kind).query)
        case "requests_query":
            return _requests_query_of(message.requests_query, frontend)
        case "clear_quarantine":
            clear = message.clear_quarantine
            return ClearQuarantine(frontend=frontend, query=clear.query, keys=tuple(clear.keys))
        case "drain" | "update_weights" as kind:
            return _operation_of(getattr(message, kind), frontend)
        case _:
            raise WireError("the message is empty")


def _abort_of(abort: pb.Abort, frontend: str) -> ev.Abort:
    ids = [meant(each, abort.tenant, all_tenants=abort.all_tenants) for each in abort.request_ids]
    others = {first: tuple(more) for first, *more in ids if more}
    return ev.Abort(frontend=frontend, query=abort.query, request_ids=tuple(each[0] for each in ids), others=others)


def _requests_query_of(query: pb.RequestsQuery, frontend: str) -> RequestsQuery:
    if not 1 <= query.page_size <= MAX_PAGE_SIZE:
        raise WireError(f"page_size is {query.page_size}; it must be between 1 and {MAX_PAGE_SIZE}")
    if unknown := [state for state in query.states if state not in _REQUEST_OF]:
        raise WireError(f"a state is {unknown[0]}, which is unknown")
    after = query.after if query.HasField("after") else None
    return RequestsQuery(
        frontend=frontend,
        query=query.query,
        page_size=query.page_size,
        tenant=None if query.all_tenants else query.tenant,
        states=frozenset(_REQUEST_OF[state] for state in query.states),
        id_prefix=query.id_prefix,
        after=None if after is None else RequestsMark(number=after.number, epoch=after.epoch),
    )


def _operation_of(asked: pb.Drain | pb.UpdateWeights, frontend: str) -> ev.Drain | UpdateWeights:
    request = asked.request
    # Also false for NaN.
    if not 0 <= request.max_seconds <= MAX_OPERATION_SECONDS:
        raise WireError(f"max_seconds is {request.max_seconds:g}; it must be between 0 and {MAX_OPERATION_SECONDS}")
    whose: dict[str, Any] = {"frontend": frontend, **fields(asked, ("query", "stop_replies"))}
    if isinstance(request, control_pb2.DrainRequest):
        worker = request.worker[:MAX_WORKER_NAME_CHARS]
        return ev.Drain(worker=worker, max_seconds=request.max_seconds, force=request.force, **whose)
    running = _RUNNING.get(request.running or control_pb2.RUNNING_REQUESTS_RECOMPUTE)
    if running is None:
        raise WireError(f"running is {request.running}, which is unknown")
    is_empty = asked.stop_replies
    return UpdateWeights(
        weights=Weights(version="", folder="") if is_empty else weights_of(request.version, request.folder),
        running=running,
        in_turn=request.in_turn,
        max_seconds=request.max_seconds or DEFAULT_UPDATE_SECONDS,
        **whose,
    )


FrontendEffect = (
    fx.Admitted
    | fx.Rejected
    | fx.StepOutput
    | fx.Waits
    | fx.AbortReply
    | fx.LoadReply
    | fx.FlushReply
    | QuarantineReply
    | RequestsReply
    | fx.CoreStatus
    | fx.AnnounceDrain
    | DrainReport
    | fx.DrainRefused
    | WeightsReport
    | fx.UpdateRefused
    | fx.Resumed
    | fx.Replaced
)


def frame_of(effect: FrontendEffect) -> bytes:
    """Encodes the effect as a CoreToFrontend frame."""
    message = pb.CoreToFrontend()
    fill(message, effect)
    return message.SerializeToString()


def fill(message: pb.CoreToFrontend, effect: FrontendEffect) -> None:
    """Fills an empty message with the effect."""
    match effect:
        case fx.StepOutput():
            _fill_output(message.step_output, effect)
        case fx.Admitted():
            message.admitted.stream = effect.stream
            message.admitted.requests_ahead = effect.requests_ahead
        case fx.Rejected():
            message.rejected.stream = effect.stream
            message.rejected.code = _REJECT[effect.code]
            message.rejected.message = effect.message
            message.rejected.field = effect.field
            message.rejected.retry_seconds = effect.retry_seconds
            message.rejected.tenant_is_full = effect.tenant_is_full
        case fx.AbortReply():
            message.abort_reply.query = effect.query
            for request_id, live in effect.outcomes:
                outcome = control_pb2.ABORT_OUTCOME_ABORTED if live else control_pb2.ABORT_OUTCOME_NOT_FOUND
                message.abort_reply.results.add(request_id=request_id, outcome=outcome)
        case fx.LoadReply():
            message.load_reply.query = effect.query
            message.load_reply.load.CopyFrom(_load_of(effect.load))
        case fx.FlushReply():
            message.flush_reply.query = effect.query
            message.flush_reply.pages = effect.pages
        case QuarantineReply():
            message.quarantine_reply.query = effect.query
            message.quarantine_reply.removed = effect.removed
            for entry in effect.entries:
                message.quarantine_reply.requests.add(**fields(entry, QuarantineEntry.__slots__))
        case RequestsReply():
            _fill_requests(message.requests_reply, effect)
        case fx.CoreStatus():
            message.core_status.CopyFrom(pb.CoreStatus(**fields(effect, _STATUS)))
            if effect.reason is not None:
                message.core_status.reason = _WAIT[effect.reason]
        case fx.Waits():
            for wait in effect.waits:
                message.waits.waits.add(reason=_WAIT[wait.reason], **fields(wait, _WAIT_FIELDS))
        case fx.AnnounceDrain():
            message.draining.SetInParent()
        case DrainReport():
            _fill_progress(message.drain_reply, effect, "DRAIN")
        case WeightsReport():
            _fill_progress(message.update_weights_reply, effect, "UPDATE")
        case fx.DrainRefused():
            _fill_refusal(message.drain_reply, effect)
        case fx.UpdateRefused():
            _fill_refusal(message.update_weights_reply, effect)
        case fx.Resumed():
            _fill_resumed(message.resumed, effect)
        case fx.Replaced():
            message.replaced.stream = effect.stream


def _fill_progress(out: Any, effect: DrainReport | WeightsReport, prefix: str) -> None:
    out.query, out.is_last = effect.query, effect.state.is_final
    names = [name for name in out.progress.DESCRIPTOR.fields_by_name if name != "state"]
    state = f"{prefix}_STATE_{effect.state.name}"
    out.progress.MergeFrom(type(out.progress)(state=state, **fields(effect, names)))


def _fill_refusal(out: Any, effect: fx.DrainRefused | fx.UpdateRefused) -> None:
    out.query, out.refusal, out.message, out.field = effect.query, _REJECT[effect.code], effect.message, effect.field


def _load_of(given: Load) -> control_pb2.GetLoadResponse:
    # A worker_lost_seconds of None stays unset.
    load = control_pb2.GetLoadResponse(**fields(given, _LOAD))
    for worker in given.per_worker:
        load.per_worker.add(state=_WORKER[worker.state], **fields(worker, _WORKER_LOAD))
    load.incidents.CopyFrom(control_pb2.Incidents(**fields(given.incidents, Incidents.__slots__)))
    load.held_pools.CopyFrom(control_pb2.HeldPools(**fields(given.held_pools, HeldPoolsLoad.__slots__)))
    return load


def _fill_requests(out: pb.RequestsReply, effect: RequestsReply) -> None:
    out.query, out.is_stale = effect.query, effect.is_stale
    for entry in effect.requests:
        # A seconds_left of None stays unset.
        added = out.requests.add(state=_REQUEST[entry.state], **fields(entry, _ENTRY))
        if entry.wait_reason is not None:
            added.wait_reason = _WAIT[entry.wait_reason]
    if effect.next is not None:
        out.next.number, out.next.epoch = effect.next.number, effect.next.epoch


def _fill_logprobs(out: pb.TokenLogprobs | pb.PromptLogprobs, values: fx.Logprobs) -> None:
    out.logprobs = packed(values.logprobs)
    out.top_k = values.top_token_ids.shape[1]
    out.top_token_ids = packed(values.top_token_ids)
    out.top_logprobs = packed(values.top_logprobs)


def _fill_output(out: pb.StepOutput, effect: fx.StepOutput) -> None:
    out.streams = packed(effect.streams)
    out.offsets = packed(effect.offsets)
    out.tokens = packed(effect.tokens)
    if effect.logprobs is not None:
        out.logprobs.entries = packed(effect.logprobs.entries)
        _fill_logprobs(out.logprobs, effect.logprobs.values)
    for piece in effect.prompt_logprobs:
        item = out.prompt_logprobs.add(stream=piece.stream, start=piece.start)
        _fill_logprobs(item, piece.values)
    for end in effect.ends:
        fill_end(out.ends.add(), end)


def _fill_resumed(out: pb.Resumed, effect: fx.Resumed) -> None:
    out.stream, out.description = effect.stream, effect.description
    for tokens, end in zip(effect.outputs, effect.ends, strict=True):
        sample = out.samples.add(tokens=packed(tokens))
        if end is not None:
            fill_end(sample.end, end)
