"""Translates what brings a request to the core, and what the journal keeps of it: a Submit and an End there and back.

Checks only what could harm the core. Owns no state.
"""

import math
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LOGPROBS, MAX_NUM_SAMPLES
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.events import MAX_DESCRIPTION_BYTES, MAX_SAMPLING_BYTES, SECRET_HASH_BYTES
from scheduler_svc.core.messages.names import core_id, meant, own_id
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.wire.arrays import WireError, array, fields, packed
from scheduler_svc.wire.resources import fill_resources, resources_of
from tandem_contract.plural import numbered

_MAX_STOP_IDS = 1024
_MAX_SAMPLES, _MAX_STREAM = 1024, (1 << 64) - 1
_MAX_TRACEPARENT = 55
_SUBMIT = tuple(name for name in ev.Submit.__slots__ if name in pb.Submit.DESCRIPTOR.fields_by_name)


def submit_of(submit: pb.Submit, frontend: str) -> ev.Submit:
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
    seconds = (submit.max_time_seconds, submit.deadline_seconds, submit.linger_seconds, submit.max_queue_seconds)
    if not submit.request_id or not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise WireError("request_id is empty, or a time limit or linger_seconds is negative or not finite")
    if not 1 <= submit.num_samples <= _MAX_SAMPLES or submit.stream + submit.num_samples - 1 > _MAX_STREAM:
        raise WireError(f"num_samples is {submit.num_samples} and stream is {submit.stream}; one is out of range")
    if submit.prompt_logprobs_from >= 1 << 30:
        raise WireError(f"prompt_logprobs_from is {submit.prompt_logprobs_from}; the limit is {(1 << 30) - 1}")
    if len(submit.traceparent) > _MAX_TRACEPARENT:
        raise WireError(f"traceparent has {len(submit.traceparent)} characters; the limit is {_MAX_TRACEPARENT}")
    _check_hashes(submit, len(prompt))
    _check_linger(submit)
    same = fields(submit, _SUBMIT)
    same |= {"prompt": prompt, "stop_token_ids": tuple(int(token) for token in stop_ids)}
    same |= {"sampling_key": _sampling_key(submit.sampling), "request_id": core_id(submit.tenant, submit.request_id)}
    same["resources"] = resources_of(submit)
    cache_read, cache_write = not submit.bypass_read, not submit.bypass_write
    return ev.Submit(frontend=frontend, cache_read=cache_read, cache_write=cache_write, **same)


def _check_linger(submit: pb.Submit) -> None:
    num_hash, num_description = len(submit.secret_hash), len(submit.description)
    expected = SECRET_HASH_BYTES if submit.linger_seconds else 0
    if num_hash != expected:
        raise WireError(f"secret_hash has {numbered(num_hash, 'byte')}; it must have {expected}")
    if num_description > MAX_DESCRIPTION_BYTES:
        raise WireError(f"description has {num_description} bytes; the limit is {MAX_DESCRIPTION_BYTES}")
    if submit.linger_seconds and (submit.num_logprobs or submit.prompt_logprobs_from):
        raise WireError("the request wants logprobs and lingers; logprobs are not kept")


def resume_of(resume: pb.Resume, frontend: str) -> ev.Resume:
    num_hash = len(resume.secret_hash)
    if num_hash != SECRET_HASH_BYTES:
        raise WireError(f"secret_hash has {numbered(num_hash, 'byte')}; it must have {SECRET_HASH_BYTES}")
    if resume.stream + MAX_NUM_SAMPLES - 1 > _MAX_STREAM:
        raise WireError(f"stream is {resume.stream}; the limit is {_MAX_STREAM - MAX_NUM_SAMPLES + 1}")
    first, *others = meant(resume.request_id, resume.tenant)
    return ev.Resume(
        frontend=frontend,
        stream=resume.stream,
        request_id=first,
        secret_hash=resume.secret_hash,
        others=tuple(others),
    )


def _sampling_key(sampling: bytes) -> bytes:
    """Returns a hash of the serialized settings without the seed. Raises WireError if they cannot be parsed.

    The core passes `sampling` to the worker unread, where bytes that are no settings fail the step of all its rows.
    """
    try:
        settings = inference_pb2.SamplingParams.FromString(sampling)
    except DecodeError as error:
        raise WireError(f"sampling is not a SamplingParams: {error}") from None
    settings.ClearField("seed")
    return sha256(settings.SerializeToString(deterministic=True)).digest()


def _check_hashes(submit: pb.Submit, num_prompt: int) -> None:
    """Checks lengths only. The core, which knows the page size, compares the hashes with the prompt's full pages."""
    num_root, num_hashes = len(submit.prefix_root), len(submit.page_hashes)
    if num_root not in (0, HASH_BYTES):
        raise WireError(f"prefix_root has {numbered(num_root, 'byte')}; it must have none or {HASH_BYTES}")
    if num_hashes % HASH_BYTES:
        raise WireError(f"page_hashes has {numbered(num_hashes, 'byte')}, which is not a multiple of {HASH_BYTES}")
    limit = num_prompt if num_root else 0
    if num_hashes > limit * HASH_BYTES:
        raise WireError(f"page_hashes has {num_hashes // HASH_BYTES} hashes; the limit is {limit}")


# The fields that have the same names and values on both sides.
_SAME = tuple(
    name
    for name in ev.Submit.__slots__
    if name in pb.Submit.DESCRIPTOR.fields_by_name and name not in ("prompt", "stop_token_ids", "stream", "page_hashes")
)
_USAGE = tuple(name for name in inference_pb2.Usage.DESCRIPTOR.fields_by_name if name in fx.Stats.__slots__)
_TIMING = tuple(inference_pb2.Timing.DESCRIPTOR.fields_by_name)
_REASON = {reason: inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in fx.EndReason}
_FAILURE = {code: pb.FailureCode.Value(f"FAILURE_CODE_{code.name}") for code in fx.FailureCode}
_REASON_OF = {number: reason for reason, number in _REASON.items()}
_FAILURE_OF = {number: code for code, number in _FAILURE.items()}


def fill_submit(out: pb.Submit, submit: ev.Submit) -> None:
    """Fills an empty message. `stream` and the page hashes, which can be computed again, are left out."""
    out.MergeFrom(pb.Submit(**fields(submit, _SAME)))
    # The core's id is made of tenant and id when the journal is read.
    out.request_id = own_id(submit.request_id, submit.tenant)
    out.prompt = packed(submit.prompt)
    out.stop_token_ids = packed(np.array(submit.stop_token_ids, np.int32))
    fill_resources(out, submit.resources)
    out.bypass_read, out.bypass_write = not submit.cache_read, not submit.cache_write


def fill_end(out: pb.End, end: fx.End) -> None:
    """Fills an empty message."""
    out.stream = end.stream
    out.usage.MergeFrom(inference_pb2.Usage(**fields(end.stats, _USAGE)))
    out.timing.MergeFrom(inference_pb2.Timing(**fields(end.stats, _TIMING)))
    fill_spans(out.weights, end.stats.weights)
    if end.reason is not None:
        out.reason = _REASON[end.reason]
    if end.stop_token_id is not None:
        out.stop_token_id = end.stop_token_id
    if end.failure is not None:
        out.failure.code, out.failure.message = _FAILURE[end.failure.code], end.failure.message


def end_of(message: pb.End) -> fx.End:
    """Returns the End of a message. Raises WireError if its reason is unknown."""
    failure = None
    if message.HasField("failure"):
        code = _FAILURE_OF.get(message.failure.code)
        if code is None:
            raise WireError(f"an End has the failure code {message.failure.code}, which is unknown")
        failure = fx.Failure(code=code, message=message.failure.message)
    reason = _REASON_OF.get(message.reason)
    if (reason is None) == (failure is None):
        raise WireError(f"an End has the reason {message.reason}, which is unknown or does not fit a failure")
    spans = spans_of(message.weights)
    has_stop_token = reason in (fx.EndReason.EOS, fx.EndReason.STOP_TOKEN)
    return fx.End(
        stream=message.stream,
        reason=reason,
        failure=failure,
        stop_token_id=message.stop_token_id if has_stop_token else None,
        stats=fx.Stats(**fields(message.usage, _USAGE), **fields(message.timing, _TIMING), weights=spans),
    )


def fill_spans(out: Any, spans: Iterable[WeightsSpan]) -> None:
    """Adds the spans to a repeated field."""
    for span in spans:
        out.add(from_token=span.from_token, version=span.version)


def spans_of(messages: Iterable[Any]) -> tuple[WeightsSpan, ...]:
    """Returns the spans of a repeated field."""
    return tuple(WeightsSpan(from_token=each.from_token, version=each.version) for each in messages)
