"""Translates messages of worker.proto to the core's events, and the core's plans, orders and answers to frames.

Owns no state. It checks every length and range before the core sees an event. WireError names the fault.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.effects import DropResource, LoadWeights, PrepareResource, WorkerAccepted
from scheduler_svc.core.messages.operators import MAX_FOLDER_CHARS, MAX_VERSION_CHARS, Weights, WeightsLoaded
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.messages.plan import NOTHING_MOVES, KeptPages, PageLabels, PageMoves, Plan, RowStart
from scheduler_svc.core.messages.resources import RESOURCE_HASH_BYTES
from scheduler_svc.core.messages.worker_info import GenerationDefaults, WorkerInfo
from scheduler_svc.wire.arrays import WireError, array, fields, packed
from scheduler_svc.wire.resources import fill_needs, kind_of, name_of
from tandem_contract.plural import numbered

# The members of both enums have the same names.
_STATUS = {pb.StepStatus.Value(f"STEP_STATUS_{status.name}"): status for status in ev.StepStatus}
# The fields that a Join and a WorkerInfo share, with the same values.
_INFO = tuple(
    name
    for name in WorkerInfo.__slots__
    if name not in ("eos_token_ids", "device", "defaults", "is_standby", "constraint_refusal")
)
_MAX_DETAIL, _MAX_NAME, _MAX_EOS_IDS, _MAX_POOL_BYTES = 2000, 512, 1024, 64


def event_of(message: pb.WorkerToCore, worker: str) -> ev.Event:
    """Returns the core's event for the message. Raises WireError if a field is out of bounds."""
    match message.WhichOneof("message"):
        case "join":
            info = _info(message.join)
            return ev.WorkerJoined(worker=worker, info=info, kept=kept_pages_of(message.join))
        case "heartbeat":
            beat = message.heartbeat
            done = beat.generation, beat.last_step
            return ev.WorkerAlive(worker=worker, num_in_flight=beat.num_in_flight, done=done)
        case "leave":
            return ev.WorkerLost(worker=worker, reason="it stops", is_orderly=True)
        case "stops":
            return ev.WorkerStops(worker=worker)
        case "result":
            return _step_done(message.result, worker)
        case "constraint_ready":
            return ready_of(message.constraint_ready, worker)
        case "weights_loaded":
            return loaded_of(message.weights_loaded, worker)
        case _:
            raise WireError("the message is empty")


def _info(join: pb.Join) -> WorkerInfo:
    if join.protocol != pb.PROTOCOL_CURRENT:
        raise WireError(f"it speaks protocol {join.protocol}; this scheduler speaks {pb.PROTOCOL_CURRENT}")
    bounds = {
        "vocab_size": (join.vocab_size, 1, 1 << 24),
        "page_size": (join.page_size, 1, 1 << 16),
        "num_pages": (join.num_pages, 2, 1 << 20),
        "max_rows": (join.max_rows, 1, 1 << 16),
        "max_length": (join.max_length, 2, 1 << 24),
        "chunk_align": (join.chunk_align, 1, 1 << 16),
        "token_budget": (join.token_budget, join.max_rows + join.chunk_align, 1 << 24),
        "logit_rows": (join.logit_rows, join.max_rows + join.chunk_align, 1 << 24),
        "window": (join.window, 0, 1 << 24),
        "sink_tokens": (join.sink_tokens, 0, join.max_length if join.window else 0),
        "host_pages": (join.host_pages, 0, 1 << 24),
        "page_copy_us": (join.page_copy_us, 0, 1e12),
        "token_us": (join.token_us, 0, 1e12),
        "max_frame_bytes": (join.max_frame_bytes, 1 << 20, 1 << 40),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise WireError(f"{name} is {value}; it must be {low} to {high}")
    if join.max_length > join.page_size << 20:
        raise WireError(f"max_length {join.max_length} takes more than {1 << 20} pages of {join.page_size}")
    for name, text in (("identity", join.identity), ("model", join.model)):
        if not 1 <= len(text) <= _MAX_NAME:
            raise WireError(f"{name} has {numbered(len(text), 'character')}; it must have 1 to {_MAX_NAME}")
    if join.weights_version or join.weights_folder:
        weights_of(join.weights_version, join.weights_folder)
    for name, data in (("pool_id", join.pool_id), ("pool_layout", join.pool_layout)):
        if len(data) > _MAX_POOL_BYTES:
            raise WireError(f"{name} has {len(data)} bytes; the limit is {_MAX_POOL_BYTES}")
    if bool(join.pool_id) != bool(join.pool_layout):
        raise WireError("only one of pool_id and pool_layout is set; a shared pool has both")
    if len(join.eos_token_ids) > _MAX_EOS_IDS:
        raise WireError(f"eos_token_ids has {len(join.eos_token_ids)} ids; the limit is {_MAX_EOS_IDS}")
    for token in join.eos_token_ids:
        if token >= join.vocab_size:
            raise WireError(f"eos_token_ids contains {token}; the vocabulary has {numbered(join.vocab_size, 'token')}")
    return WorkerInfo(
        **fields(join, _INFO),
        eos_token_ids=tuple(join.eos_token_ids),
        device=join.device[:_MAX_NAME],
        constraint_refusal=join.constraint_refusal[:_MAX_DETAIL],
        is_standby=join.standby,
        defaults=GenerationDefaults(**fields(join.defaults, GenerationDefaults.__slots__)),
    )


def _step_done(result: pb.StepResult, worker: str) -> ev.StepDone:
    status = _STATUS.get(result.status)
    if status is None:
        raise WireError(f"step status {result.status} is unknown")
    if result.tokens_per_row:
        raise WireError("tokens_per_row is set; several tokens per row and step are not supported")
    pool_id = result.pool_id
    if len(pool_id) > _MAX_POOL_BYTES:
        raise WireError(f"pool_id has {len(pool_id)} bytes; the limit is {_MAX_POOL_BYTES}")
    return ev.StepDone(
        worker=worker,
        generation=result.generation,
        step=result.step,
        status=status,
        detail=result.detail[:_MAX_DETAIL],
        tokens=array(result.tokens, np.int32, "tokens"),
        nonfinite=array(result.nonfinite, np.int32, "nonfinite") if result.nonfinite else NO_IDS,
        compute_us=result.compute_us,
        logprobs=_logprobs(result.logprobs) if result.HasField("logprobs") else ev.NO_LOGPROBS,
        prompt_logprobs=_logprobs(result.prompt_logprobs) if result.HasField("prompt_logprobs") else ev.NO_LOGPROBS,
        pool_id=pool_id,
        damaged_pages=result.damaged_pages,
        constraints=of_step(result),
    )


def _logprobs(message: pb.Logprobs) -> ev.RawLogprobs:
    return ev.RawLogprobs(
        logprobs=array(message.logprobs, np.float32, "logprobs"),
        top_k=message.top_k,
        top_token_ids=array(message.top_token_ids, np.int32, "top_token_ids"),
        top_logprobs=array(message.top_logprobs, np.float32, "top_logprobs"),
    )


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


def frame_of(**answer: Any) -> bytes:
    """Encodes an answer to a worker by its name in CoreToWorker."""
    return pb.CoreToWorker(**answer).SerializeToString()


def joined_frame(accepted: WorkerAccepted, listen: str) -> bytes:
    """Accepts the worker. `listen` is the address that callers connect to."""
    joined = pb.Joined(
        generation=accepted.generation,
        listen=listen,
        page_root=bytes.fromhex(accepted.page_root),
        keeps_pages=accepted.keeps_pages,
    )
    return frame_of(joined=joined)


_ROOT_BYTES = 16


def fill_labels(out: pb.PageLabels, labels: PageLabels) -> None:
    """Encodes the labels."""
    out.forget = labels.forget
    out.pages = packed(labels.pages)
    out.hashes = b"".join(labels.hashes)
    out.tokens = b"".join(labels.tokens)


def kept_pages_of(join: pb.Join) -> KeptPages | None:
    """Returns the pages that the worker has kept, None without any. The Join's sizes have been checked.

    Raises WireError if a length or a page is wrong.
    """
    if not join.HasField("kept"):
        return None
    kept, page_bytes = join.kept, 4 * join.page_size
    pages = array(kept.labels.pages, np.int32, "kept.labels.pages")
    if len(kept.page_root) != _ROOT_BYTES:
        raise WireError(f"kept.page_root has {numbered(len(kept.page_root), 'byte')}; it must have {_ROOT_BYTES}")
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


def ready_of(message: pb.ConstraintReady, worker: str) -> ev.ResourceReady:
    if len(message.hash) != RESOURCE_HASH_BYTES:
        raise WireError(f"hash has {numbered(len(message.hash), 'byte')}; it must have {RESOURCE_HASH_BYTES}")
    kind, error = kind_of(message.kind), message.error[:_MAX_DETAIL]
    return ev.ResourceReady(worker=worker, hash=message.hash, error=error, kind=kind)


def of_step(result: pb.StepResult) -> ev.ConstraintsOfStep | None:
    """Returns what a result says of constraints; None in the usual case."""
    if not result.constraint_complete and not result.constraint_failed:
        return None
    return ev.ConstraintsOfStep(
        complete=_indices(result.constraint_complete, "constraint_complete"),
        failed=_indices(result.constraint_failed, "constraint_failed"),
        detail=result.constraint_detail[:_MAX_DETAIL],
    )


def _indices(data: bytes, name: str) -> Int32Array:
    return array(data, np.int32, name) if data else NO_IDS


def order_frame(order: PrepareResource | DropResource) -> bytes:
    """Encodes an order to a worker."""
    kind = name_of(order.kind)
    if isinstance(order, PrepareResource):
        return frame_of(prepare_constraint=pb.PrepareConstraint(hash=order.hash, source=order.source, kind=kind))
    return frame_of(drop_constraint=pb.DropConstraint(hash=order.hash, kind=kind))


def weights_of(version: str, folder: str) -> Weights:
    """Raises WireError unless both have a length in their bounds."""
    for name, text, most in (("version", version, MAX_VERSION_CHARS), ("folder", folder, MAX_FOLDER_CHARS)):
        if not 1 <= len(text) <= most:
            raise WireError(f"{name} has {numbered(len(text), 'character')}; it must have 1 to {most}")
    return Weights(version=version, folder=folder)


def load_frame(effect: LoadWeights) -> bytes:
    """Encodes the order to load weights."""
    order = pb.LoadWeights(
        version=effect.weights.version, folder=effect.weights.folder, roots=effect.roots, keep_rows=effect.keep_rows
    )
    return frame_of(load_weights=order)


def loaded_of(message: pb.WeightsLoaded, worker: str) -> WeightsLoaded:
    """Returns the core's event."""
    return WeightsLoaded(
        worker=worker,
        version=message.version[:MAX_VERSION_CHARS],
        ok=message.ok,
        detail=message.detail[:_MAX_DETAIL],
    )
