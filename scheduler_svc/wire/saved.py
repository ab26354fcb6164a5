"""Translates what the journal keeps of a request: the core's Submit to its message, and an End there and back.

Owns no state.
"""

import numpy as np
from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.wire import weights as weights_wire
from scheduler_svc.wire.arrays import WireError, fields, packed
from scheduler_svc.wire.submit import core_id

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
    out.request_id = submit.request_id.removeprefix(core_id(submit.tenant, ""))
    out.prompt = packed(submit.prompt)
    out.stop_token_ids = packed(np.array(submit.stop_token_ids, np.int32))
    out.bypass_read, out.bypass_write = not submit.cache_read, not submit.cache_write


def fill_end(out: pb.End, end: fx.End) -> None:
    """Fills an empty message."""
    out.stream = end.stream
    out.usage.MergeFrom(inference_pb2.Usage(**fields(end.stats, _USAGE)))
    out.timing.MergeFrom(inference_pb2.Timing(**fields(end.stats, _TIMING)))
    weights_wire.fill_spans(out.weights, end.stats.weights)
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
    spans = weights_wire.spans_of(message.weights)
    has_stop_token = reason in (fx.EndReason.EOS, fx.EndReason.STOP_TOKEN)
    return fx.End(
        stream=message.stream,
        reason=reason,
        failure=failure,
        stop_token_id=message.stop_token_id if has_stop_token else None,
        stats=fx.Stats(**fields(message.usage, _USAGE), **fields(message.timing, _TIMING), weights=spans),
    )
