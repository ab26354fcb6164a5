"""Pairs the messages of worker.proto with the core's events, and with its plans, orders and answers.

Owns no state. Each length and range is checked before the core sees an event. WireError names the fault.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.operators import MAX_DETAIL_CHARS, WeightsLoaded
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.messages.plan import NOTHING_MOVES, KeptPages, PageLabels, PageMoves, Plan, RowStart
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS, RESOURCE_HASH_BYTES
from scheduler_svc.core.messages.worker_info import MAX_POOL_BYTES, WorkerInfo
from tandem_contract.bounds import Length, Range, WireError
from tandem_contract.codec import Codec, OneOf, array, packed
from tandem_contract.plural import numbered

# The members of both enums have the same names.
_STATUS = {pb.StepStatus.Value(f"STEP_STATUS_{status.name}"): status for status in ev.StepStatus}
_ROOT = Length(16, 16)
_OF_WORKER = ("worker",)
_POOL_ID = Length(0, MAX_POOL_BYTES)
# In a plan, the hash of a row without a constraint.
_NO_CONSTRAINT = bytes(RESOURCE_HASH_BYTES)


def kind_of(name: str) -> str:
    """Returns the kind of an order or an answer, which names no constraint. Raises WireError if it is unknown."""
    if (name or CONSTRAINT) not in KINDS:
        raise WireError(f"the kind of resource {name[:64]!r} is unknown; the known ones are {', '.join(KINDS)}")
    return name or CONSTRAINT


def _kind_in(message: pb.PrepareConstraint | pb.DropConstraint | pb.ConstraintReady) -> str:
    return kind_of(message.kind)


def _name_of(order: fx.PrepareResource | fx.DropResource | ev.ResourceReady) -> str:
    return "" if order.kind == CONSTRAINT else order.kind


_OF_RESOURCE: dict[str, Any] = {"given": _OF_WORKER, "made": {"kind": _kind_in}, "sent": {"kind": _name_of}}


# Events --------------------------------------------------------------------------------------------------------------


def _check_info(info: WorkerInfo) -> None:
    """Raises WireError if fields contradict each other."""
    least = info.max_rows + info.chunk_align
    Range(least, 1 << 24).checked("token_budget", info.token_budget)
    Range(least, 1 << 24).checked("logit_rows", info.logit_rows)
    Range(0, info.max_length if info.window else 0).checked("sink_tokens", info.sink_tokens)
    if info.max_length > info.page_size << 20:
        raise WireError(f"max_length {info.max_length} takes more than {1 << 20} pages of {info.page_size}")
    for one, other in (("pool_id", "pool_layout"), ("weights_version", "weights_folder")):
        if bool(getattr(info, one)) != bool(getattr(info, other)):
            raise WireError(f"only one of {one} and {other} is set; a worker has both or none")
    for token in info.eos_token_ids:
        if token >= info.vocab_size:
            raise WireError(f"eos_token_ids contains {token}; the vocabulary has {numbered(info.vocab_size, 'token')}")


def kept_pages_of(join: pb.Join) -> KeptPages | None:
    """Returns the pages that the worker has kept, None without any. The Join's sizes have been checked.

    Raises WireError if a length or a page is wrong.
    """
    if not join.HasField("kept"):
        return None
    kept, page_bytes = join.kept, 4 * join.page_size
    pages = array(kept.labels.pages, np.int32, "kept.labels.pages")
    _ROOT.checked("kept.page_root", kept.page_root)
    if len(pages) and not 1 <= int(pages.min()) <= int(pages.max()) < join.num_pages:
        raise WireError(f"kept.labels.pages must be 1 to {join.num_pages - 1}")
    if len(np.unique(pages)) != len(pages):
        raise WireError("kept.labels.pages has a page twice")
    return KeptPages(
        page_root=kept.page_root.hex(),
        generation=kept.generation,
        labels=PageLabels(
            pages=pages,
            hashes=_split(kept.labels.hashes, HASH_BYTES, len(pages), "kept.labels.hashes"),
            tokens=_split(kept.labels.tokens, page_bytes, len(pages), "kept.labels.tokens"),
        ),
    )


def _split(data: bytes, size: int, count: int, name: str) -> tuple[bytes, ...]:
    if len(data) != size * count:
        raise WireError(f"{name} has {numbered(len(data), 'byte')}; {numbered(count, 'page', 'need')} {size * count}")
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def _sent_pages(kept: KeptPages | None) -> pb.KeptPages | None:
    if kept is None:
        return None
    message = pb.KeptPages(page_root=bytes.fromhex(kept.page_root), generation=kept.generation)
    fill_labels(message.labels, kept.labels)
    return message


EVENTS = OneOf(
    pb.WorkerToCore,
    join=Codec(
        pb.Join,
        ev.WorkerJoined,
        given=_OF_WORKER,
        made={"kept": kept_pages_of},
        parts=(Codec(pb.Join, WorkerInfo, names={"is_standby": "standby"}, check=_check_info, is_whole=False),),
        sent={"protocol": lambda _: pb.PROTOCOL_CURRENT, "kept": lambda joined: _sent_pages(joined.kept)},
        # The shell reads these.
        other=("key", "dtype", "tokenizer_json", "chat_template", "chat"),
    ),
    heartbeat=Codec(
        pb.Heartbeat,
        ev.WorkerAlive,
        given=_OF_WORKER,
        made={"done": lambda beat: (beat.generation, beat.last_step)},
        sent={
            "generation": lambda alive: (alive.done or (0, 0))[0],
            "last_step": lambda alive: (alive.done or (0, 0))[1],
        },
        other=("phase",),
    ),
    leave=Codec(
        pb.Leave, ev.WorkerLost, given=_OF_WORKER, made={"reason": lambda _: "it stops", "is_orderly": lambda _: True}
    ),
    stops=Codec(pb.Stops, ev.WorkerStops, given=_OF_WORKER),
    constraint_ready=Codec(pb.ConstraintReady, ev.ResourceReady, **_OF_RESOURCE),
    weights_loaded=Codec(pb.WeightsLoaded, WeightsLoaded, given=_OF_WORKER),
)


def event_of(message: pb.WorkerToCore, worker: str) -> ev.Event:
    """Returns the core's event for the message. Raises WireError if a field is out of bounds."""
    if message.HasField("result"):
        return _step_done(message.result, worker)
    if message.HasField("join") and message.join.protocol != pb.PROTOCOL_CURRENT:
        raise WireError(f"it speaks protocol {message.join.protocol}; this scheduler speaks {pb.PROTOCOL_CURRENT}")
    return EVENTS.decode(message, worker=worker)


# By hand, because one comes with each step.
def _step_done(result: pb.StepResult, worker: str) -> ev.StepDone:
    status = _STATUS.get(result.status)
    if status is None:
        raise WireError(f"step status {result.status} is unknown")
    if result.tokens_per_row:
        raise WireError("tokens_per_row is set; several tokens per row and step are not supported")
    return ev.StepDone(
        worker=worker,
        generation=result.generation,
        step=result.step,
        status=status,
        detail=result.detail[:MAX_DETAIL_CHARS],
        tokens=array(result.tokens, np.int32, "tokens"),
        nonfinite=array(result.nonfinite, np.int32, "nonfinite") if result.nonfinite else NO_IDS,
        compute_us=result.compute_us,
        logprobs=_logprobs(result.logprobs) if result.HasField("logprobs") else ev.NO_LOGPROBS,
        prompt_logprobs=_logprobs(result.prompt_logprobs) if result.HasField("prompt_logprobs") else ev.NO_LOGPROBS,
        pool_id=_POOL_ID.checked("pool_id", result.pool_id),
        damaged_pages=result.damaged_pages,
        constraints=_constraints_of(result),
    )


def _logprobs(message: pb.Logprobs) -> ev.RawLogprobs:
    return ev.RawLogprobs(
        logprobs=array(message.logprobs, np.float32, "logprobs"),
        top_k=message.top_k,
        top_token_ids=array(message.top_token_ids, np.int32, "top_token_ids"),
        top_logprobs=array(message.top_logprobs, np.float32, "top_logprobs"),
    )


def _constraints_of(result: pb.StepResult) -> ev.ConstraintsOfStep | None:
    """Returns what a result says of constraints; None in the usual case."""
    if not result.constraint_complete and not result.constraint_failed:
        return None
    return ev.ConstraintsOfStep(
        complete=_indices(result.constraint_complete, "constraint_complete"),
        failed=_indices(result.constraint_failed, "constraint_failed"),
        detail=result.constraint_detail[:MAX_DETAIL_CHARS],
    )


def _indices(data: bytes, name: str) -> Int32Array:
    return array(data, np.int32, name) if data else NO_IDS


# Plans ---------------------------------------------------------------------------------------------------------------


def plan_frame(plan: Plan) -> bytes:
    """Encodes the plan as a CoreToWorker frame."""
    message = pb.CoreToWorker()
    out = message.plan
    out.generation, out.step, out.checksum = plan.generation, plan.step, plan.checksum
    out.decode_rows = packed(plan.decode_rows)
    if len(plan.zero_pages):
        out.zero_pages = packed(plan.zero_pages)
    if plan.starts:
        _fill_started(out.started, plan.starts)
    if len(plan.append_rows):
        out.appends.rows = packed(plan.append_rows)
        out.appends.pages = packed(plan.append_pages)
    if len(plan.chunk_rows):
        out.chunks.rows = packed(plan.chunk_rows)
        out.chunks.starts = packed(plan.chunk_starts)
        out.chunks.counts = packed(plan.chunk_counts)
        out.chunks.samples = plan.chunk_samples.tobytes()
    if plan.moves is not NOTHING_MOVES:
        _fill_moves(out, plan.moves)
    if plan.take_over is not None:
        out.take_over.pool_id, out.take_over.generation = plan.take_over.pool_id, plan.take_over.generation
    if plan.labels is not None:
        fill_labels(out.labels, plan.labels)
    return message.SerializeToString()


def _fill_moves(out: pb.StepPlan, moves: PageMoves) -> None:
    if len(moves.saved_pages):
        out.saves.pages, out.saves.slots = packed(moves.saved_pages), packed(moves.saved_slots)
    if len(moves.copied_from):
        out.copies.sources, out.copies.targets = packed(moves.copied_from), packed(moves.copied_to)
        out.copies.counts = packed(moves.copied_tokens)
    if len(moves.loaded_pages):
        out.loads.pages, out.loads.slots = packed(moves.loaded_pages), packed(moves.loaded_slots)


def _ints(values: Sequence[int]) -> bytes:
    return packed(np.array(values, np.int32))


def _fill_started(out: pb.StartedRows, starts: tuple[RowStart, ...]) -> None:
    out.rows = _ints([start.row for start in starts])
    out.num_tokens = _ints([len(start.tokens) for start in starts])
    out.tokens = b"".join(packed(start.tokens) for start in starts)
    out.num_pages = _ints([len(start.pages) for start in starts])
    out.pages = b"".join(packed(start.pages) for start in starts)
    out.first_position = _ints([start.first_position for start in starts])
    out.num_prompt_tokens = _ints([start.num_prompt_tokens for start in starts])
    out.sampling = b"".join(start.sampling for start in starts)
    out.num_sampling_bytes = _ints([len(start.sampling) for start in starts])
    out.sample_idx = _ints([start.sample_idx for start in starts])
    out.banned_until = _ints([start.banned_until for start in starts])
    out.num_banned = _ints([len(start.banned) for start in starts])
    out.banned = b"".join(_ints(start.banned) for start in starts)
    if any(start.num_logprobs for start in starts):
        out.num_logprobs = _ints([start.num_logprobs for start in starts])
    if any(start.prompt_logprobs_from for start in starts):
        out.prompt_logprobs_from = _ints([start.prompt_logprobs_from for start in starts])
    fill_needs(out, starts)


def fill_labels(out: pb.PageLabels, labels: PageLabels) -> None:
    out.forget = labels.forget
    out.pages = packed(labels.pages)
    out.hashes = b"".join(labels.hashes)
    out.tokens = b"".join(labels.tokens)


def fill_needs(out: pb.StartedRows, starts: Sequence[RowStart]) -> None:
    if any(start.constraint for start in starts):
        out.constraints = b"".join(start.constraint or _NO_CONSTRAINT for start in starts)
    for idx, start in enumerate(starts):
        for need in start.other_needs:
            out.other_needs.add(start=idx, kind=need.kind, hash=need.hash)


# Orders and answers --------------------------------------------------------------------------------------------------

_EFFECTS = OneOf(
    pb.CoreToWorker,
    joined=Codec(
        pb.Joined,
        fx.WorkerAccepted,
        given=_OF_WORKER,
        made={"page_root": lambda joined: joined.page_root.hex()},
        sent={"page_root": lambda accepted: bytes.fromhex(accepted.page_root)},
        other=("listen",),
    ),
    refused=Codec(pb.Refused, fx.WorkerRefused, given=_OF_WORKER),
    rejoin=Codec(pb.Rejoin, fx.AskRejoin, given=_OF_WORKER),
    seated=Codec(pb.Seated, fx.WorkerProven, given=(*_OF_WORKER, "was_standby")),
    dismissed=Codec(pb.Dismissed, fx.DismissWorker, given=_OF_WORKER),
    load_weights=Codec(pb.LoadWeights, fx.LoadWeights, given=_OF_WORKER),
    prepare_constraint=Codec(pb.PrepareConstraint, fx.PrepareResource, **_OF_RESOURCE),
    drop_constraint=Codec(pb.DropConstraint, fx.DropResource, **_OF_RESOURCE),
)


def frame_of(effect: fx.Effect, **others: Any) -> bytes:
    """Encodes an effect as a CoreToWorker frame; `others` are fields that the effect does not have."""
    if isinstance(effect, fx.SendPlan):
        return plan_frame(effect.plan)
    [(name, arguments)] = _EFFECTS.encode(effect).items()
    message: Any = {name: arguments | others}
    return pb.CoreToWorker(**message).SerializeToString()
