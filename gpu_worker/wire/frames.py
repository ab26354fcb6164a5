"""Parses frames of worker.proto into validated arrays, and serialises results.

Owns every length and range check that needs no row state: invalid bytes raise `PlanError` (in a plan with known
generation and step) or `FrameError` (anywhere else), never another exception. Knows nothing of torch or of rows' state.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.arrays import HostArray
from gpu_worker.geometry import Geometry
from gpu_worker.sampling.inputs import TokenLogprobs
from gpu_worker.wire.fields import Int32Array, PlanError, are_distinct, flags, int32_array
from gpu_worker.wire.page_orders import NO_ORDERS, PageOrders, read_page_orders
from gpu_worker.wire.started import StartedRows, read_started
from tandem_contract.plural import numbered

# The largest frame that the scheduler accepts from a worker.
MAX_JOIN_BYTES = 128 << 20
NO_TOKENS = np.zeros(0, np.int32)
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class FrameError(ValueError):
    """A frame that is not a message of worker.proto; it gets no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One StepPlan, every number within the worker's sizes."""

    generation: int
    step: int
    checksum: int
    started: StartedRows | None = None
    append_rows: Int32Array = field(default_factory=lambda: NO_TOKENS)
    append_pages: Int32Array = field(default_factory=lambda: NO_TOKENS)
    chunk_rows: Int32Array = field(default_factory=lambda: NO_TOKENS)
    chunk_starts: Int32Array = field(default_factory=lambda: NO_TOKENS)
    chunk_counts: Int32Array = field(default_factory=lambda: NO_TOKENS)
    chunk_samples: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    decode_rows: Int32Array = field(default_factory=lambda: NO_TOKENS)
    page_orders: PageOrders[HostArray] = NO_ORDERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one plan."""

    generation: int
    step: int
    status: "pb.StepStatus.ValueType"
    detail: str = ""
    tokens: Int32Array = field(default_factory=lambda: NO_TOKENS)
    # Indices into `tokens` of rows with logits that were not finite.
    nonfinite: Int32Array = field(default_factory=lambda: NO_TOKENS)
    compute_us: int = 0
    # Logprobs of sampled tokens and of prompt tokens, where requested, in worker.proto's orders.
    logprobs: TokenLogprobs[HostArray] | None = None
    prompt_logprobs: TokenLogprobs[HostArray] | None = None
    # In the outcome of a plan that takes a pool over: the pool that the worker uses now.
    pool_id: bytes = b""
    # Pages of a pool that was taken over that the step found damaged.
    damaged_pages: int = 0
    # Indices into `tokens` of rows with a complete constraint, which no token can follow, and of rows
    # with a failed constraint, with the reason of the first of these.
    constraint_complete: Int32Array = field(default_factory=lambda: NO_TOKENS)
    constraint_failed: Int32Array = field(default_factory=lambda: NO_TOKENS)
    constraint_detail: str = ""


class WeightsLoader(Protocol):
    """What carries out an order to load new weights in place of the served model's, as link and runner know it."""

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        """Loads them, or refuses and changes nothing. Raises a fatal error if it failed in between."""
        ...


def parse_frame(frame: bytes | memoryview) -> pb.CoreToWorker:
    """The message in one frame. Raises FrameError."""
    message = pb.CoreToWorker()
    try:
        message.ParseFromString(bytes(frame))
    except DecodeError as error:
        raise FrameError(f"frame of {numbered(len(frame), 'byte')} is not a CoreToWorker message: {error}") from error
    if message.WhichOneof("message") is None:
        raise FrameError(f"frame of {numbered(len(frame), 'byte')} has a message that this worker does not know")
    return message


def join_frame(join: pb.Join) -> bytes:
    """`join` as one WorkerToCore frame. Raises ValueError if it is larger than the scheduler accepts."""
    message = pb.WorkerToCore(join=join)
    num_bytes = message.ByteSize()
    if num_bytes > MAX_JOIN_BYTES:
        raise ValueError(
            f"Join has {numbered(num_bytes, 'byte')} (tokenizer {len(join.tokenizer_json)}, chat template "
            f"{len(join.chat_template.encode())}, other files of chats {join.chat.ByteSize()}), but the scheduler "
            f"accepts at most {MAX_JOIN_BYTES}; "
            "serve a model with a smaller tokenizer, or remove its files to serve token ids alone"
        )
    return message.SerializeToString()


def read_plan(message: pb.StepPlan, geometry: Geometry) -> Plan:
    """The plan's arrays, checked against `geometry`. Raises PlanError."""
    chunks, append_rows = message.chunks, message.appends.rows
    num_chunks = len(chunks.rows) // 4
    plan = Plan(
        generation=message.generation,
        step=message.step,
        checksum=message.checksum,
        started=read_started(message.started, geometry) if message.HasField("started") else None,
        append_rows=int32_array(append_rows, "appends.rows", 1, geometry.max_rows),
        append_pages=int32_array(
            message.appends.pages, "appends.pages", 1, geometry.num_pages - 1, len(append_rows) // 4
        ),
        chunk_rows=int32_array(chunks.rows, "chunks.rows", 1, geometry.max_rows),
        chunk_starts=int32_array(chunks.starts, "chunks.starts", 0, geometry.max_length - 1, num_chunks),
        chunk_counts=int32_array(chunks.counts, "chunks.counts", 1, geometry.token_budget, num_chunks),
        chunk_samples=flags(chunks.samples, "chunks.samples", num_chunks),
        decode_rows=int32_array(message.decode_rows, "decode_rows", 1, geometry.max_rows),
        page_orders=read_page_orders(message, geometry),
    )
    running = (plan.chunk_rows, plan.decode_rows) if num_chunks else (plan.decode_rows,)
    if not are_distinct(geometry.max_rows, *running):
        raise PlanError("a row occurs twice in chunks.rows and decode_rows")
    cost = plan.decode_rows.size
    if num_chunks:
        tiles = -(-plan.chunk_counts.astype(np.int64) // geometry.chunk_align)
        cost += int(tiles.sum()) * geometry.chunk_align
    if cost > geometry.token_budget:
        raise PlanError(f"the plan costs {numbered(cost, 'token')}; token_budget is {geometry.token_budget}")
    return plan


def result_frame(outcome: Outcome) -> bytes:
    """`outcome` as one WorkerToCore frame."""
    # The result is filled in place, because a message in a constructor's argument is copied.
    message = pb.WorkerToCore()
    result = message.result
    result.generation = outcome.generation
    result.step = outcome.step
    result.status = outcome.status
    result.detail = outcome.detail
    result.compute_us = outcome.compute_us
    result.pool_id = outcome.pool_id
    result.damaged_pages = outcome.damaged_pages
    result.constraint_detail = outcome.constraint_detail
    for name in ("tokens", "nonfinite", "constraint_complete", "constraint_failed"):
        array: Int32Array = getattr(outcome, name)
        if array.size:
            setattr(result, name, array.astype(_INT32, copy=False).tobytes())
    for values, into in ((outcome.logprobs, result.logprobs), (outcome.prompt_logprobs, result.prompt_logprobs)):
        if values is not None:
            # Present in the result even if every field of it is empty.
            into.SetInParent()
            into.logprobs = values.logprobs.astype(_FLOAT32, copy=False).tobytes()
            into.top_k = values.top_token_ids.shape[1]
            into.top_token_ids = values.top_token_ids.astype(_INT32, copy=False).tobytes()
            into.top_logprobs = values.top_logprobs.astype(_FLOAT32, copy=False).tobytes()
    return message.SerializeToString()
