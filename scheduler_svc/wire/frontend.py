"""Pairs the messages of frontend.proto with the core's events and effects, and the token file with its message.

Owns no state. Front ends validate requests for their callers. This module checks only what could harm the core.
"""

from collections.abc import Iterator
from hashlib import sha256
from operator import attrgetter
from typing import Any

from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.core.messages.names import core_id, meant, own_id
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.messages.reports import RequestEntry
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS, RESOURCE_HASH_BYTES, Resource
from scheduler_svc.wire.worker import kind_of
from tandem_contract.bounds import Length, Range, WireError
from tandem_contract.codec import Codec, OneOf, packed, parsed
from tandem_contract.plural import numbered

DEFAULT_UPDATE_SECONDS = 600.0
_STREAMS = Range(0, (1 << 64) - 1)
_OF_FRONTEND = ("frontend",)


# What a request brings -----------------------------------------------------------------------------------------------


def _resources_of(submit: pb.Submit) -> Iterator[Resource]:
    # A constraint has fields of its own, as in the first version of the message; the others name their kind.
    if submit.constraint or submit.constraint_hash:
        yield Resource(CONSTRAINT, submit.constraint_hash, submit.constraint)
    for one in submit.other_resources:
        yield Resource(kind_of(one.kind), one.hash, one.source)


def _constraint(name: str, submit: ev.Submit) -> bytes | None:
    return next((getattr(one, name) for one in submit.resources if one.kind == CONSTRAINT), None)


def _sampling_key(submit: pb.Submit) -> bytes:
    """Returns a hash of the serialized settings without the seed. Raises WireError if they cannot be parsed.

    The core passes `sampling` to the worker unread, where bytes that are not settings fail the step of all its rows.
    """
    settings = parsed(inference_pb2.SamplingParams, submit.sampling)
    settings.ClearField("seed")
    return sha256(settings.SerializeToString(deterministic=True)).digest()


def _check_submit(submit: ev.Submit) -> None:
    """Raises WireError if fields contradict each other."""
    if not own_id(submit.request_id, submit.tenant):
        raise WireError("request_id is empty")
    _STREAMS.checked("the last stream", submit.streams[-1])
    num_root, num_hashes, limit = len(submit.prefix_root), len(submit.page_hashes), len(submit.prompt)
    if num_root not in (0, HASH_BYTES):
        raise WireError(f"prefix_root has {numbered(num_root, 'byte')}; it must have none or {HASH_BYTES}")
    if num_hashes % HASH_BYTES:
        raise WireError(f"page_hashes has {numbered(num_hashes, 'byte')}, which is not a multiple of {HASH_BYTES}")
    # The core, which knows the page size, compares the hashes with the prompt's full pages.
    if num_hashes > (limit := limit if num_root else 0) * HASH_BYTES:
        raise WireError(f"page_hashes has {num_hashes // HASH_BYTES} hashes; the limit is {limit}")
    expected = ev.SECRET_HASH_BYTES if submit.lingers else 0
    Length(expected, expected).checked("secret_hash", submit.secret_hash)
    if submit.lingers and (submit.num_logprobs or submit.prompt_logprobs_from):
        raise WireError("the request wants logprobs and lingers; logprobs are not kept")
    _check_resources(submit)


def _check_resources(submit: ev.Submit) -> None:
    for one in submit.resources:
        Length(1, KINDS[one.kind].max_bytes).checked(one.kind, one.source)
        Length(RESOURCE_HASH_BYTES, RESOURCE_HASH_BYTES).checked(f"{one.kind}_hash", one.hash)
    kinds = [one.kind for one in submit.resources]
    if len(set(kinds)) != len(kinds):
        raise WireError("two resources of the request have the same kind; it may have one of each")
    if submit.min_new_tokens and CONSTRAINT in kinds:
        raise WireError(f"min_new_tokens is {submit.min_new_tokens}; with a constraint it must be 0")


SUBMIT = Codec(
    pb.Submit,
    ev.Submit,
    given=_OF_FRONTEND,
    made={
        "request_id": lambda submit: core_id(submit.tenant, submit.request_id),
        "cache_read": lambda submit: not submit.bypass_read,
        "cache_write": lambda submit: not submit.bypass_write,
        "resources": lambda submit: tuple(_resources_of(submit)),
        "sampling_key": _sampling_key,
    },
    sent={
        "request_id": lambda submit: own_id(submit.request_id, submit.tenant),
        "bypass_read": lambda submit: not submit.cache_read,
        "bypass_write": lambda submit: not submit.cache_write,
        "constraint": lambda submit: _constraint("source", submit),
        "constraint_hash": lambda submit: _constraint("hash", submit),
        "other_resources": lambda submit: [
            {"kind": one.kind, "hash": one.hash, "source": one.source}
            for one in submit.resources
            if one.kind != CONSTRAINT
        ],
    },
    check=_check_submit,
)


# Events --------------------------------------------------------------------------------------------------------------


def _meant_by_abort(abort: pb.Abort) -> list[tuple[str, ...]]:
    return [meant(name, abort.tenant, all_tenants=abort.all_tenants) for name in abort.request_ids]


_WEIGHTS = Codec(control_pb2.UpdateWeightsRequest, fx.Weights, is_whole=False)
EVENTS = OneOf(
    pb.FrontendToCore,
    hello=Codec(pb.Hello, ev.FrontendJoined, given=_OF_FRONTEND, other=("secret",)),
    submit=SUBMIT,
    cancel=Codec(pb.Cancel, ev.Cancel, given=_OF_FRONTEND),
    resume=Codec(
        pb.Resume,
        ev.Resume,
        given=_OF_FRONTEND,
        made={
            "request_id": lambda resume: meant(resume.request_id, resume.tenant)[0],
            "others": lambda resume: meant(resume.request_id, resume.tenant)[1:],
        },
        other=("tenant",),
        check=lambda resume: _STREAMS.checked("the last stream", resume.stream + MAX_NUM_SAMPLES - 1),
    ),
    finish=Codec(pb.Finish, ev.Finish, given=_OF_FRONTEND),
    abort=Codec(
        pb.Abort,
        ev.Abort,
        given=_OF_FRONTEND,
        made={
            "request_ids": lambda abort: tuple(first for first, *_ in _meant_by_abort(abort)),
            "others": lambda abort: {first: tuple(more) for first, *more in _meant_by_abort(abort) if more},
        },
        other=("tenant", "all_tenants"),
    ),
    load_query=Codec(pb.LoadQuery, ev.LoadQuery, given=_OF_FRONTEND),
    flush_cache=Codec(pb.FlushCache, ev.FlushCache, given=_OF_FRONTEND),
    quarantine_query=Codec(pb.QuarantineQuery, ev.QuarantineQuery, given=_OF_FRONTEND),
    clear_quarantine=Codec(pb.ClearQuarantine, ev.ClearQuarantine, given=_OF_FRONTEND),
    requests_query=Codec(
        pb.RequestsQuery,
        ev.RequestsQuery,
        given=_OF_FRONTEND,
        made={"tenant": lambda query: None if query.all_tenants else query.tenant},
        other=("all_tenants",),
    ),
    drain=Codec(pb.Drain, ev.Drain, given=_OF_FRONTEND, within=("request",)),
    update_weights=Codec(
        pb.UpdateWeights,
        ev.UpdateWeights,
        given=_OF_FRONTEND,
        within=("request",),
        made={
            # An operator that leaves names the query alone.
            "weights": lambda asked: (
                fx.Weights(version="", folder="") if asked.stop_replies else _WEIGHTS.decode(asked.request)
            ),
            "max_seconds": lambda asked: asked.request.max_seconds or DEFAULT_UPDATE_SECONDS,
        },
        sent={"request.version": attrgetter("weights.version"), "request.folder": attrgetter("weights.folder")},
    ),
)


def event_of(message: pb.FrontendToCore, frontend: str) -> ev.Event:
    """Returns the core's event for the message. Raises WireError if a field is out of bounds."""
    return EVENTS.decode(message, frontend=frontend)


# Effects -------------------------------------------------------------------------------------------------------------


def _check_end(end: fx.End) -> None:
    if (end.reason is None) == (end.failure is None):
        raise WireError(f"an End has the reason {end.reason} and the failure {end.failure}; it must have one of them")


# For a caller of several samples, a span names its sample.
SPAN = Codec(inference_pb2.WeightsSpan, fx.WeightsSpan, other=("sample_idx",))
END = Codec(
    pb.End,
    fx.End,
    made={"stop_token_id": lambda end: end.stop_token_id if end.reason in _BY_TOKEN else None},
    parts=(Codec(pb.End, fx.Stats, within=("usage", "timing"), parts=(SPAN,), is_whole=False),),
    check=_check_end,
)
_BY_TOKEN = (inference_pb2.FINISH_REASON_EOS, inference_pb2.FINISH_REASON_STOP_TOKEN)
_OUTCOMES = (control_pb2.ABORT_OUTCOME_NOT_FOUND, control_pb2.ABORT_OUTCOME_ABORTED)


def _outcomes(reply: fx.AbortReply) -> list[dict[str, Any]]:
    return [{"request_id": request_id, "outcome": _OUTCOMES[live]} for request_id, live in reply.outcomes]


def _samples(resumed: fx.Resumed) -> list[dict[str, Any]]:
    pairs = zip(resumed.outputs, resumed.ends, strict=True)
    return [{"tokens": packed(tokens), "end": None if end is None else END.encode(end)} for tokens, end in pairs]


_PROGRESS: dict[str, Any] = {
    "given": _OF_FRONTEND,
    "within": ("progress",),
    "sent": {"is_last": attrgetter("state.is_final")},
    "other": ("refusal", "message", "field"),
}
_REFUSAL: dict[str, Any] = {
    "given": (*_OF_FRONTEND, "field"),
    "names": {"code": "refusal"},
    # A class may have the same field at fault for all refusals.
    "sent": {"field": attrgetter("field")},
    "other": ("progress", "is_last"),
}
_ENTRY = Codec(control_pb2.RequestEntry, RequestEntry, other=("abort_id",))
# The front end adds these.
_LOAD = Codec(control_pb2.GetLoadResponse, fx.Load, other=("not_serving", "not_serving_since", "not_serving_reason"))
_EFFECTS = OneOf(
    pb.CoreToFrontend,
    admitted=Codec(pb.Admitted, fx.Admitted, given=_OF_FRONTEND),
    rejected=Codec(pb.Rejected, fx.Rejected, given=_OF_FRONTEND),
    abort_reply=Codec(pb.AbortReply, fx.AbortReply, given=(*_OF_FRONTEND, "outcomes"), sent={"results": _outcomes}),
    load_reply=Codec(pb.LoadReply, fx.LoadReply, given=_OF_FRONTEND, parts=(_LOAD,)),
    flush_reply=Codec(pb.FlushReply, fx.FlushReply, given=_OF_FRONTEND),
    quarantine_reply=Codec(pb.QuarantineReply, fx.QuarantineReply, given=_OF_FRONTEND, names={"entries": "requests"}),
    requests_reply=Codec(pb.RequestsReply, fx.RequestsReply, given=_OF_FRONTEND, parts=(_ENTRY,)),
    core_status=Codec(pb.CoreStatus, fx.CoreStatus, given=_OF_FRONTEND),
    waits=Codec(pb.Waits, fx.Waits, given=_OF_FRONTEND),
    draining=Codec(pb.Draining, fx.AnnounceDrain, given=_OF_FRONTEND),
    drain_reply=(
        Codec(pb.DrainReply, fx.DrainReport, **_PROGRESS),
        Codec(pb.DrainReply, fx.DrainRefused, **_REFUSAL),
    ),
    update_weights_reply=(
        Codec(pb.UpdateWeightsReply, fx.WeightsReport, **_PROGRESS),
        Codec(pb.UpdateWeightsReply, fx.UpdateRefused, **_REFUSAL),
    ),
    resumed=Codec(
        pb.Resumed,
        fx.Resumed,
        given=(*_OF_FRONTEND, "request_id", "outputs", "ends"),
        sent={"samples": _samples},
    ),
    replaced=Codec(pb.Replaced, fx.Replaced, given=_OF_FRONTEND),
)


def frame_of(effect: fx.Effect) -> bytes:
    """Encodes the effect as a CoreToFrontend frame."""
    message = pb.CoreToFrontend()
    fill(message, effect)
    return message.SerializeToString()


def fill(message: pb.CoreToFrontend, effect: fx.Effect) -> None:
    """Fills an empty message with the effect."""
    if isinstance(effect, fx.StepOutput):
        _fill_output(message.step_output, effect)
    else:
        message.MergeFrom(pb.CoreToFrontend(**_EFFECTS.encode(effect)))


# By hand, because one comes with each step.
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
        out.ends.add(**END.encode(end))


def _fill_logprobs(out: pb.TokenLogprobs | pb.PromptLogprobs, values: fx.Logprobs) -> None:
    out.logprobs = packed(values.logprobs)
    out.top_k = values.top_token_ids.shape[1]
    out.top_token_ids = packed(values.top_token_ids)
    out.top_logprobs = packed(values.top_logprobs)
