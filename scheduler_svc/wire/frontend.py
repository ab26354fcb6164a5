"""Translates messages of frontend.proto to the core's events, and the core's effects to frames.

Owns no state. Front ends validate requests for their callers. This module checks only what could harm the core.
"""

import math

import numpy as np
from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LOGPROBS
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.messages.reports import Load, WorkerLoad
from scheduler_svc.wire.arrays import WireError, array, packed, parsed

_MAX_STOP_IDS = 1024
_MAX_SAMPLES, _MAX_STREAM = 1024, (1 << 64) - 1

_REJECT = {
    fx.RejectCode.INVALID: pb.REJECT_CODE_INVALID,
    fx.RejectCode.DUPLICATE: pb.REJECT_CODE_DUPLICATE,
    fx.RejectCode.QUEUE_FULL: pb.REJECT_CODE_QUEUE_FULL,
    fx.RejectCode.NOT_READY: pb.REJECT_CODE_NOT_READY,
}
_REASON = {
    fx.EndReason.EOS: inference_pb2.FINISH_REASON_EOS,
    fx.EndReason.STOP_TOKEN: inference_pb2.FINISH_REASON_STOP_TOKEN,
    fx.EndReason.STOP_STRING: inference_pb2.FINISH_REASON_STOP_STRING,
    fx.EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    fx.EndReason.TIME_LIMIT: inference_pb2.FINISH_REASON_TIME_LIMIT,
    fx.EndReason.ABORTED: inference_pb2.FINISH_REASON_ABORTED,
    fx.EndReason.CONTEXT_FULL: inference_pb2.FINISH_REASON_CONTEXT_FULL,
}
_FAILURE = {
    fx.FailureCode.INTERNAL: pb.FAILURE_CODE_INTERNAL,
    fx.FailureCode.DEADLINE: pb.FAILURE_CODE_DEADLINE,
    fx.FailureCode.SHUTDOWN: pb.FAILURE_CODE_SHUTDOWN,
    fx.FailureCode.NO_WORKER: pb.FAILURE_CODE_NO_WORKER,
}


def parse(frame: bytes) -> pb.FrontendToCore:
    """Parses a frame. Raises WireError."""
    return parsed(pb.FrontendToCore, frame)


def event_of(message: pb.FrontendToCore, frontend: str) -> ev.Event:
    """Returns the core's event for the message. Raises WireError if a field is out of bounds."""
    match message.WhichOneof("message"):
        case "hello":
            return ev.FrontendJoined(frontend=frontend)
        case "submit":
            return _submit(message.submit, frontend)
        case "cancel":
            return ev.Cancel(frontend=frontend, stream=message.cancel.stream)
        case "finish":
            return ev.Finish(
                frontend=frontend, stream=message.finish.stream, output_tokens=message.finish.output_tokens
            )
        case "abort":
            ids = tuple(message.abort.request_ids)
            return ev.Abort(frontend=frontend, query=message.abort.query, request_ids=ids)
        case "load_query":
            return ev.LoadQuery(frontend=frontend, query=message.load_query.query)
        case "flush_cache":
            return ev.FlushCache(frontend=frontend, query=message.flush_cache.query)
        case _:
            raise WireError("the message is empty")


def _submit(submit: pb.Submit, frontend: str) -> ev.Submit:
    prompt = array(submit.prompt, np.int32, "prompt")
    stop_ids = array(submit.stop_token_ids, np.int32, "stop_token_ids")
    if not len(prompt):
        raise WireError("the prompt is empty")
    if not 1 <= submit.max_new_tokens < 1 << 30 or submit.min_new_tokens >= 1 << 30:
        raise WireError(
            f"max_new_tokens is {submit.max_new_tokens} and min_new_tokens {submit.min_new_tokens}; one is out of range"
        )
    if len(stop_ids) > _MAX_STOP_IDS:
        raise WireError(f"stop_token_ids has {len(stop_ids)} ids; the limit is {_MAX_STOP_IDS}")
    if len(submit.sampling) > ev.MAX_SAMPLING_BYTES:
        raise WireError(f"sampling has {len(submit.sampling)} bytes; the limit is {ev.MAX_SAMPLING_BYTES}")
    if submit.num_logprobs > 1 + MAX_LOGPROBS:
        raise WireError(f"num_logprobs is {submit.num_logprobs}; the limit is {1 + MAX_LOGPROBS}")
    seconds = (submit.max_time_seconds, submit.deadline_seconds)
    if not submit.request_id or not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise WireError("request_id is empty, or max_time_seconds or deadline_seconds is negative or not finite")
    if not 1 <= submit.num_samples <= _MAX_SAMPLES or submit.stream + submit.num_samples - 1 > _MAX_STREAM:
        raise WireError(f"num_samples is {submit.num_samples} and stream is {submit.stream}; one is out of range")
    if submit.prompt_logprobs_from >= 1 << 30:
        raise WireError(f"prompt_logprobs_from is {submit.prompt_logprobs_from}; the limit is {(1 << 30) - 1}")
    _check_hashes(submit, len(prompt))
    return ev.Submit(
        frontend=frontend,
        stream=submit.stream,
        request_id=submit.request_id,
        prompt=prompt,
        sampling=submit.sampling,
        max_new_tokens=submit.max_new_tokens,
        min_new_tokens=submit.min_new_tokens,
        stop_token_ids=tuple(int(token) for token in stop_ids),
        ignore_eos=submit.ignore_eos,
        priority=submit.priority,
        max_time_seconds=submit.max_time_seconds,
        deadline_seconds=submit.deadline_seconds,
        num_samples=submit.num_samples,
        num_logprobs=submit.num_logprobs,
        prompt_logprobs_from=submit.prompt_logprobs_from,
        prefix_root=submit.prefix_root,
        page_hashes=submit.page_hashes,
        cache_read=not submit.bypass_read,
        cache_write=not submit.bypass_write,
    )


def _check_hashes(submit: pb.Submit, num_prompt: int) -> None:
    """Checks lengths only. The core, which knows the page size, compares the hashes with the prompt's full pages."""
    num_root, num_hashes = len(submit.prefix_root), len(submit.page_hashes)
    if num_root not in (0, HASH_BYTES):
        raise WireError(f"prefix_root has {num_root} bytes; it must have none or {HASH_BYTES}")
    if num_hashes % HASH_BYTES:
        raise WireError(f"page_hashes has {num_hashes} bytes, which is not a multiple of {HASH_BYTES}")
    limit = num_prompt if num_root else 0
    if num_hashes > limit * HASH_BYTES:
        raise WireError(f"page_hashes has {num_hashes // HASH_BYTES} hashes; the limit is {limit}")


FrontendEffect = (
    fx.Admitted
    | fx.Rejected
    | fx.StepOutput
    | fx.AbortReply
    | fx.LoadReply
    | fx.FlushReply
    | fx.CoreStatus
    | fx.AnnounceDrain
)
_SUMS = tuple(name for name in Load.__slots__ if name not in ("per_worker", "worker_lost_seconds"))


def frame_of(effect: FrontendEffect) -> bytes:
    """Encodes the effect as a CoreToFrontend frame."""
    message = pb.CoreToFrontend()
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
        case fx.AbortReply():
            message.abort_reply.query = effect.query
            for request_id, live in effect.outcomes:
                outcome = control_pb2.ABORT_OUTCOME_ABORTED if live else control_pb2.ABORT_OUTCOME_NOT_FOUND
                message.abort_reply.results.add(request_id=request_id, outcome=outcome)
        case fx.LoadReply():
            message.load_reply.query = effect.query
            load = message.load_reply.load
            for name in _SUMS:
                setattr(load, name, getattr(effect.load, name))
            if effect.load.worker_lost_seconds is not None:
                load.worker_lost_seconds = effect.load.worker_lost_seconds
            for worker in effect.load.per_worker:
                load.per_worker.add(**{name: getattr(worker, name) for name in WorkerLoad.__slots__})
        case fx.FlushReply():
            message.flush_reply.query = effect.query
            message.flush_reply.pages = effect.pages
        case fx.CoreStatus():
            message.core_status.queue_full = effect.queue_full
            message.core_status.not_serving = effect.not_serving
            message.core_status.workers = effect.workers
        case fx.AnnounceDrain():
            message.draining.SetInParent()
    return message.SerializeToString()


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
        item, stats = out.ends.add(), end.stats
        item.stream = end.stream
        if end.reason is not None:
            item.reason = _REASON[end.reason]
        if end.stop_token_id is not None:
            item.stop_token_id = end.stop_token_id
        if end.failure is not None:
            item.failure.code = _FAILURE[end.failure.code]
            item.failure.message = end.failure.message
        item.usage.prompt_tokens = stats.prompt_tokens
        item.usage.output_tokens = stats.output_tokens
        item.usage.discarded_tokens = stats.discarded_tokens
        item.usage.recomputed_tokens = stats.recomputed_tokens
        item.usage.cached_prompt_tokens = stats.cached_prompt_tokens
        item.timing.queue_seconds = stats.queue_seconds
        item.timing.prefill_seconds = stats.prefill_seconds
        item.timing.first_token_seconds = stats.first_token_seconds
        item.timing.decode_seconds = stats.decode_seconds
        item.timing.total_seconds = stats.total_seconds
        item.timing.preemptions = stats.preemptions
        item.timing.worker_changes = stats.worker_changes
