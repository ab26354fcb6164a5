"""Frames of worker.proto as validated arrays, and results back into frames.

Owns every length and range check that needs no row state: hostile bytes raise `PlanError` (a plan whose generation
and step are known) or `FrameError` (anything else), never another exception. Knows nothing of torch or of rows' state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry, align_up

Int32Array = NDArray[np.int32]
_EMPTY = np.zeros(0, np.int32)


class FrameError(ValueError):
    """A frame that is not a message of worker.proto; there is nothing to answer."""


class PlanError(ValueError):
    """A plan that cannot be carried out; the message names field, value and limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRows:
    """Rows in full; one entry per row, ragged arrays cut by their counts."""

    rows: Int32Array
    tokens: Sequence[Int32Array]
    pages: Sequence[Int32Array]
    first_position: Int32Array
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: Int32Array
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    sample_idx: Int32Array
    banned_until: Int32Array
    banned: Sequence[Int32Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One StepPlan, every number within the worker's sizes."""

    generation: int
    step: int
    checksum: int
    started: StartedRows | None = None
    append_rows: Int32Array = field(default_factory=lambda: _EMPTY)
    append_pages: Int32Array = field(default_factory=lambda: _EMPTY)
    chunk_rows: Int32Array = field(default_factory=lambda: _EMPTY)
    chunk_starts: Int32Array = field(default_factory=lambda: _EMPTY)
    chunk_counts: Int32Array = field(default_factory=lambda: _EMPTY)
    chunk_samples: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    decode_rows: Int32Array = field(default_factory=lambda: _EMPTY)
    zero_pages: Int32Array = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one plan."""

    generation: int
    step: int
    status: "pb.StepStatus"
    detail: str = ""
    tokens: Int32Array = field(default_factory=lambda: _EMPTY)
    # Indices into `tokens` whose logits were not finite.
    nonfinite: Int32Array = field(default_factory=lambda: _EMPTY)
    compute_us: int = 0


def parse_frame(frame: bytes | memoryview) -> pb.CoreToWorker:
    """The message in one frame. Raises FrameError."""
    message = pb.CoreToWorker()
    try:
        message.ParseFromString(bytes(frame))
    except DecodeError as error:
        raise FrameError(f"frame of {len(frame)} bytes is no CoreToWorker message: {error}") from error
    if message.WhichOneof("message") is None:
        raise FrameError(f"frame of {len(frame)} bytes holds no message this worker knows")
    return message


def read_plan(message: pb.StepPlan, geometry: Geometry) -> Plan:
    """The plan's arrays, checked against `geometry`. Raises PlanError."""
    chunks = message.chunks
    num_chunks = len(chunks.rows) // 4
    plan = Plan(
        generation=message.generation,
        step=message.step,
        checksum=message.checksum,
        started=_read_started(message.started, geometry) if message.HasField("started") else None,
        append_rows=_array(message.appends.rows, "appends.rows", 1, geometry.max_rows),
        append_pages=_array(
            message.appends.pages, "appends.pages", 1, geometry.num_pages - 1, len(message.appends.rows) // 4
        ),
        chunk_rows=_array(chunks.rows, "chunks.rows", 1, geometry.max_rows),
        chunk_starts=_array(chunks.starts, "chunks.starts", 0, geometry.max_length - 1, num_chunks),
        chunk_counts=_array(chunks.counts, "chunks.counts", 1, geometry.token_budget, num_chunks),
        chunk_samples=_flags(chunks.samples, "chunks.samples", num_chunks),
        decode_rows=_array(message.decode_rows, "decode_rows", 1, geometry.max_rows),
        zero_pages=_array(message.zero_pages, "zero_pages", 1, geometry.num_pages - 1),
    )
    running = np.concatenate([plan.chunk_rows, plan.decode_rows])
    if np.unique(running).size != running.size:
        raise PlanError("a row stands twice among chunks.rows and decode_rows")
    cost = plan.decode_rows.size + sum(align_up(int(n), geometry.chunk_align) for n in plan.chunk_counts)
    if cost > geometry.token_budget:
        raise PlanError(f"the plan costs {cost} tokens; token_budget is {geometry.token_budget}")
    return plan


def _read_started(message: pb.StartedRows, geometry: Geometry) -> StartedRows:
    name = "started."
    num = len(message.rows) // 4
    highest = np.iinfo(np.int32).max
    rows = _array(message.rows, name + "rows", 1, geometry.max_rows)
    if np.unique(rows).size != rows.size:
        raise PlanError("a row stands twice in started.rows")
    num_tokens = _array(message.num_tokens, name + "num_tokens", 1, geometry.max_length, num)
    num_pages = _array(message.num_pages, name + "num_pages", 0, geometry.pages_per_row, num)
    num_banned = _array(message.num_banned, name + "num_banned", 0, geometry.vocab_size, num)
    tokens = _array(message.tokens, name + "tokens", 0, geometry.vocab_size - 1, int(num_tokens.sum()))
    pages = _array(message.pages, name + "pages", 1, geometry.num_pages - 1, int(num_pages.sum()))
    banned = _array(message.banned, name + "banned", 0, geometry.vocab_size - 1, int(num_banned.sum()))
    first_position = _array(message.first_position, name + "first_position", 0, geometry.max_length - 1, num)
    if (first_position >= num_tokens).any():
        raise PlanError("started.first_position must lie below started.num_tokens")
    seed = np.frombuffer(message.seed, np.dtype("<u8")) if len(message.seed) == 8 * num else None
    if seed is None:
        raise PlanError(f"started.seed has {len(message.seed)} bytes; {num} rows need {8 * num}")
    return StartedRows(
        rows=rows,
        tokens=_split(tokens, num_tokens),
        pages=_split(pages, num_pages),
        first_position=first_position,
        temperature=_floats(message.temperature, name + "temperature", 0.0, 1e6, num),
        top_p=_floats(message.top_p, name + "top_p", 0.0, 1.0, num),
        top_k=_array(message.top_k, name + "top_k", 0, highest, num),
        min_p=_floats(message.min_p, name + "min_p", 0.0, 1.0, num),
        seed=seed,
        sample_idx=_array(message.sample_idx, name + "sample_idx", 0, highest, num),
        banned_until=_array(message.banned_until, name + "banned_until", 0, highest, num),
        banned=_split(banned, num_banned),
    )


def _split(values: Int32Array, counts: Int32Array) -> Sequence[Int32Array]:
    return np.split(values, np.cumsum(counts)[:-1]) if counts.size else ()


def _array(data: bytes, name: str, low: int, high: int, size: int | None = None) -> Int32Array:
    """int32 little-endian values, each in low..high; `size` of them where it is given."""
    if len(data) % 4 or (size is not None and len(data) != 4 * size):
        need = f"{size} entries need {4 * size}" if size is not None else "int32 entries need a multiple of 4"
        raise PlanError(f"{name} has {len(data)} bytes; {need}")
    values = np.frombuffer(data, np.dtype("<i4"))
    if values.size and (values.min() < low or values.max() > high):
        wrong = values[(values < low) | (values > high)][0]
        raise PlanError(f"{name} holds {wrong}; it must be {low} to {high}")
    return values


def _floats(data: bytes, name: str, low: float, high: float, size: int) -> NDArray[np.float32]:
    if len(data) != 4 * size:
        raise PlanError(f"{name} has {len(data)} bytes; {size} entries need {4 * size}")
    values = np.frombuffer(data, np.dtype("<f4"))
    inside = (values >= low) & (values <= high)
    if not inside.all():
        raise PlanError(f"{name} holds {values[~inside][0]}; it must be {low} to {high}")
    return values


def _flags(data: bytes, name: str, size: int) -> NDArray[np.bool_]:
    values = np.frombuffer(data, np.uint8)
    if values.size != size or (values > 1).any():
        raise PlanError(f"{name} must be {size} bytes of 0 or 1")
    return values.astype(np.bool_)


def result_frame(outcome: Outcome) -> bytes:
    """`outcome` as one WorkerToCore frame."""
    result = pb.StepResult(
        generation=outcome.generation,
        step=outcome.step,
        status=outcome.status,
        detail=outcome.detail,
        tokens=outcome.tokens.astype("<i4", copy=False).tobytes(),
        nonfinite=outcome.nonfinite.astype("<i4", copy=False).tobytes(),
        compute_us=outcome.compute_us,
    )
    return pb.WorkerToCore(result=result).SerializeToString()
