"""Translates messages of frontend.proto to the core's events, and the core's effects to frames.

Owns no state. Front ends validate requests for their callers. This module checks only what could harm the core.
"""

import math
from hashlib import sha256

import numpy as np
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LOGPROBS, MAX_NUM_SAMPLES
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.messages.quarantine import (
    ClearQuarantine,
    QuarantineEntry,
    QuarantineQuery,
    QuarantineReply,
)
from scheduler_svc.core.messages.reports import Incidents, Load, WorkerLoad
from scheduler_svc.core.messages.submit import MAX_DESCRIPTION_BYTES, MAX_SAMPLING_BYTES, SECRET_HASH_BYTES
from scheduler_svc.wire.arrays import WireError, array, fields, packed

_MAX_STOP_IDS = 1024
_MAX_SAMPLES, _MAX_STREAM = 1024, (1 << 64) - 1

# The members of these enums have the same names on both sides.
_REJECT = {code: pb.RejectCode.Value(f"REJECT_CODE_{code.name}") for code in fx.RejectCode}
_REASON = {reason: inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in fx.EndReason}
_FAILURE = {code: pb.FailureCode.Value(f"FAILURE_CODE_{code.name}") for code in fx.FailureCode}

# The fields that have the same names and values on both sides.
_SUBMIT = tuple(name for name in ev.Submit.__slots__ if name in pb.Submit.DESCRIPTOR.fields_by_name)
_LOAD = tuple(name for name in Load.__slots__ if name not in ("per_worker", "incidents"))
_USAGE = tuple(inference_pb2.Usage.DESCRIPTOR.fields_by_name)
_TIMING = tuple(inference_pb2.Timing.DESCRIPTOR.fields_by_name)


def event_of(message: pb.FrontendToCore, frontend: str) -> ev.Event:
    """Returns the core's event for the message. Raises WireError if a field is out of bounds."""
    match message.WhichOneof("message"):
        case "hello":
            return ev.FrontendJoined(frontend=frontend)
        case "submit":
            return _submit(message.submit, frontend)
        case "cancel":
            return ev.Cancel(frontend=frontend, stream=message.cancel.stream, detach=message.cancel.detach)
        case "resume":
            return _resume(message.resume, frontend)
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
        case "quarantine_query":
            return QuarantineQuery(frontend=frontend, query=message.quarantine_query.query)
        case "clear_quarantine":
            clear = message.clear_quarantine
            return ClearQuarantine(frontend=frontend, query=clear.query, keys=tuple(clear.keys))
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
    if len(submit.sampling) > MAX_SAMPLING_BYTES:
        raise WireError(f"sampling has {len(submit.sampling)} bytes; the limit is {MAX_SAMPLING_BYTES}")
    if submit.num_logprobs > 1 + MAX_LOGPROBS:
        raise WireError(f"num_logprobs is {submit.num_logprobs}; the limit is {1 + MAX_LOGPROBS}")
    seconds = (submit.max_time_seconds, submit.deadline_seconds, submit.linger_seconds)
    if not submit.request_id or not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise WireError("request_id is empty, or a time limit or linger_seconds is negative or not finite")
    if not 1 <= submit.num_samples <= _MAX_SAMPLES or submit.stream + submit.num_samples - 1 > _MAX_STREAM:
        raise WireError(f"num_samples is {submit.num_samples} and stream is {submit.stream}; one is out of range")
    if submit.prompt_logprobs_from >= 1 << 30:
        raise WireError(f"prompt_logprobs_from is {submit.prompt_logprobs_from}; the limit is {(1 << 30) - 1}")
    _check_hashes(submit, len(prompt))
    _check_linger(submit)
    same = fields(submit, _SUBMIT)
    same |= {"prompt": prompt, "stop_token_ids": tuple(int(token) for token in stop_ids)}
    same |= {"sampling_key": _sampling_key(submit.sampling)}
    cache_read, cache_write = not submit.bypass_read, not submit.bypass_write
    return ev.Submit(frontend=frontend, cache_read=cache_read, cache_write=cache_write, **same)


def _check_linger(submit: pb.Submit) -> None:
    num_hash, num_description = len(submit.secret_hash), len(submit.description)
    expected = SECRET_HASH_BYTES if submit.linger_seconds else 0
    if num_hash != expected:
        raise WireError(f"secret_hash has {num_hash} bytes; it must have {expected}")
    if num_description > MAX_DESCRIPTION_BYTES:
        raise WireError(f"description has {num_description} bytes; the limit is {MAX_DESCRIPTION_BYTES}")
    if submit.linger_seconds and (submit.num_logprobs or submit.prompt_logprobs_from):
        raise WireError("the request wants logprobs and lingers; logprobs are not kept")


def _resume(resume: pb.Resume, frontend: str) -> ev.Resume:
    num_hash = len(resume.secret_hash)
    if num_hash != SECRET_HASH_BYTES:
        raise WireError(f"secret_hash has {num_hash} bytes; it must have {SECRET_HASH_BYTES}")
    if resume.stream + MAX_NUM_SAMPLES - 1 > _MAX_STREAM:
        raise WireError(f"stream is {resume.stream}; the limit is {_MAX_STREAM - MAX_NUM_SAMPLES + 1}")
    return ev.Resume(
        frontend=frontend, stream=resume.stream, request_id=resume.request_id, secret_hash=resume.secret_hash
    )


def _sampling_key(sampling: bytes) -> bytes:
    """Returns a hash of the serialized settings without the seed, or of all bytes if they are no settings."""
    try:
        settings = inference_pb2.SamplingParams.FromString(sampling)
    except DecodeError:
        return sha256(sampling).digest()
    settings.ClearField("seed")
    return sha256(settings.SerializeToString(deterministic=True)).digest()


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
    | QuarantineReply
    | fx.CoreStatus
    | fx.AnnounceDrain
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
        case fx.AbortReply():
            message.abort_reply.query = effect.query
            for request_id, live in effect.outcomes:
                outcome = control_pb2.ABORT_OUTCOME_ABORTED if live else control_pb2.ABORT_OUTCOME_NOT_FOUND
                message.abort_reply.results.add(request_id=request_id, outcome=outcome)
        case fx.LoadReply():
            message.load_reply.query = effect.query
            # A worker_lost_seconds of None stays unset.
            load = control_pb2.GetLoadResponse(**fields(effect.load, _LOAD))
            for worker in effect.load.per_worker:
                load.per_worker.add(**fields(worker, WorkerLoad.__slots__))
            counts = control_pb2.Incidents(**fields(effect.load.incidents, Incidents.__slots__))
            load.incidents.CopyFrom(counts)
            message.load_reply.load.CopyFrom(load)
        case fx.FlushReply():
            message.flush_reply.query = effect.query
            message.flush_reply.pages = effect.pages
        case QuarantineReply():
            message.quarantine_reply.query = effect.query
            message.quarantine_reply.removed = effect.removed
            for entry in effect.entries:
                message.quarantine_reply.requests.add(**fields(entry, QuarantineEntry.__slots__))
        case fx.CoreStatus():
            message.core_status.queue_full = effect.queue_full
            message.core_status.not_serving = effect.not_serving
            message.core_status.workers = effect.workers
        case fx.AnnounceDrain():
            message.draining.SetInParent()
        case fx.Resumed():
            _fill_resumed(message.resumed, effect)
        case fx.Replaced():
            message.replaced.stream = effect.stream


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
        _fill_end(out.ends.add(), end)


def _fill_resumed(out: pb.Resumed, effect: fx.Resumed) -> None:
    out.stream, out.description = effect.stream, effect.description
    for tokens, end in zip(effect.outputs, effect.ends, strict=True):
        sample = out.samples.add(tokens=packed(tokens))
        if end is not None:
            _fill_end(sample.end, end)


def _fill_end(item: pb.End, end: fx.End) -> None:
    usage, timing = fields(end.stats, _USAGE), fields(end.stats, _TIMING)
    item.stream = end.stream
    item.usage.CopyFrom(inference_pb2.Usage(**usage))
    item.timing.CopyFrom(inference_pb2.Timing(**timing))
    if end.reason is not None:
        item.reason = _REASON[end.reason]
    if end.stop_token_id is not None:
        item.stop_token_id = end.stop_token_id
    if end.failure is not None:
        item.failure.code = _FAILURE[end.failure.code]
        item.failure.message = end.failure.message
