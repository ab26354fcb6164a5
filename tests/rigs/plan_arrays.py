"""Reads a StepPlan's raw arrays and checks every length first.

Owns the wire layout of a plan and nothing else. It checks no values, only that no array is short, long or ragged, and
that each row's sampling is complete.
"""

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from tandem.internal.v1 import worker_pb2 as pb
from tandem.v1 import inference_pb2

from tests.rigs.sampling import SCALARS, Settings


class PlanError(Exception):
    """The plan breaks the contract. The message says where."""


_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRow:
    row: int
    tokens: np.ndarray
    pages: list[int]
    first_position: int
    num_prompt_tokens: int
    settings: Settings
    banned_until: int
    banned: frozenset[int]
    num_logprobs: int
    prompt_logprobs_from: int
    # The hash of its constraint; empty without one.
    constraint: bytes = b""
    # Kind and hash of what it needs besides a constraint.
    other_needs: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    row: int
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArrays:
    # (page, host page)
    saves: list[tuple[int, int]]
    zero_pages: list[int]
    # (source, target, token slots)
    copies: list[tuple[int, int, int]]
    # (page, host page)
    loads: list[tuple[int, int]]
    started: list[StartedRow]
    appends: list[tuple[int, int]]
    chunks: list[Chunk]
    decode_rows: list[int]


def _array(data: bytes, dtype: str, name: str, length: int | None = None) -> np.ndarray:
    kind = np.dtype(dtype)
    if len(data) % kind.itemsize:
        raise PlanError(f"{name}: {len(data)} bytes are not a multiple of {kind.itemsize}")
    values = np.frombuffer(data, dtype=kind)
    if length is not None and len(values) != length:
        raise PlanError(f"{name}: {len(values)} entries where {length} belong")
    return values


def _rare(data: bytes, dtype: str, name: str, length: int, none: float) -> np.ndarray:
    """Reads a field that is empty if no row uses it."""
    if not data:
        return np.full(length, none, dtype)
    values = _array(data, dtype, name, length)
    if (values == none).all():
        raise PlanError(f"{name} is set and no row asks for it")
    return values


def _pieces(data: bytes, name: str, counts: np.ndarray, dtype: str = "<i4") -> list[np.ndarray]:
    if len(counts) and int(counts.min()) < 0:
        raise PlanError(f"{name}: a count is {int(counts.min())}")
    values = _array(data, dtype, name, int(counts.sum()))
    edges = np.cumsum(counts)[:-1]
    return np.split(values, edges) if len(counts) else []


def _started(message: pb.StartedRows) -> list[StartedRow]:
    rows = _array(message.rows, "<i4", "started.rows")
    n = len(rows)
    tokens = _pieces(message.tokens, "tokens", _array(message.num_tokens, "<i4", "num_tokens", n))
    pages = _pieces(message.pages, "pages", _array(message.num_pages, "<i4", "num_pages", n))
    banned = _pieces(message.banned, "banned", _array(message.num_banned, "<i4", "num_banned", n))
    first = _array(message.first_position, "<i4", "first_position", n)
    prompt = _array(message.num_prompt_tokens, "<i4", "num_prompt_tokens", n)
    until = _array(message.banned_until, "<i4", "banned_until", n)
    settings = _settings(message, n)
    constraints, needs = _constraints(message.constraints, n), _needs(message, n)
    num_logprobs = _rare(message.num_logprobs, "<i4", "num_logprobs", n, 0)
    logprobs_from = _rare(message.prompt_logprobs_from, "<i4", "prompt_logprobs_from", n, 0)
    return [
        StartedRow(
            row=int(rows[i]),
            tokens=tokens[i],
            pages=pages[i].tolist(),
            first_position=int(first[i]),
            num_prompt_tokens=int(prompt[i]),
            settings=settings[i],
            banned_until=int(until[i]),
            banned=frozenset(banned[i].tolist()),
            num_logprobs=int(num_logprobs[i]),
            prompt_logprobs_from=int(logprobs_from[i]),
            constraint=constraints[i],
            other_needs=needs[i],
        )
        for i in range(n)
    ]


def _needs(message: pb.StartedRows, n: int) -> list[tuple[tuple[str, bytes], ...]]:
    needs: list[tuple[tuple[str, bytes], ...]] = [()] * n
    for need in message.other_needs:
        if need.start >= n or not need.kind or len(need.hash) != _HASH_BYTES:
            raise PlanError(f"other_needs: row {need.start} of {n}, kind {need.kind!r}, {len(need.hash)} bytes")
        needs[need.start] = (*needs[need.start], (need.kind, need.hash))
    return needs


def _constraints(data: bytes, n: int) -> list[bytes]:
    if not data:
        return [b""] * n
    hashes = [data[i : i + _HASH_BYTES] for i in range(0, len(data), _HASH_BYTES)]
    if len(hashes) != n or len(data) % _HASH_BYTES:
        raise PlanError(f"constraints: {len(data)} bytes where {n} hashes belong")
    if not any(map(any, hashes)):
        raise PlanError("constraints is set and no row has one")
    return [one if any(one) else b"" for one in hashes]


def _settings(message: pb.StartedRows, n: int) -> list[Settings]:
    sizes = _array(message.num_sampling_bytes, "<i4", "num_sampling_bytes", n)
    pieces = _pieces(message.sampling, "sampling", sizes, "<u1")
    sample_idx = _array(message.sample_idx, "<i4", "sample_idx", n)
    return [
        Settings.of(_params(piece.tobytes()), idx) if piece.size else Settings(sample_idx=idx)
        for piece, idx in zip(pieces, sample_idx.tolist(), strict=True)
    ]


def _params(data: bytes) -> inference_pb2.SamplingParams:
    try:
        params = inference_pb2.SamplingParams.FromString(data)
    except DecodeError as error:
        raise PlanError(f"sampling is not a SamplingParams: {error}") from None
    missing = [name for name in SCALARS if not params.HasField(name)]
    if missing:
        raise PlanError(f"sampling lacks {', '.join(missing)}")
    return params


def _host_copies(copies: pb.HostCopies, name: str) -> list[tuple[int, int]]:
    pages = _array(copies.pages, "<i4", f"{name}.pages").tolist()
    return list(zip(pages, _array(copies.slots, "<i4", f"{name}.slots", len(pages)).tolist(), strict=True))


def _page_copies(copies: pb.PageCopies) -> list[tuple[int, int, int]]:
    sources = _array(copies.sources, "<i4", "copies.sources").tolist()
    targets = _array(copies.targets, "<i4", "copies.targets", len(sources)).tolist()
    counts = _array(copies.counts, "<i4", "copies.counts", len(sources)).tolist()
    return list(zip(sources, targets, counts, strict=True))


def read_plan(plan: pb.StepPlan) -> PlanArrays:
    """Reads a plan. Raises PlanError if an array's length is wrong."""
    append_rows = _array(plan.appends.rows, "<i4", "appends.rows").tolist()
    append_pages = _array(plan.appends.pages, "<i4", "appends.pages", len(append_rows)).tolist()
    rows = _array(plan.chunks.rows, "<i4", "chunks.rows").tolist()
    starts = _array(plan.chunks.starts, "<i4", "chunks.starts", len(rows)).tolist()
    counts = _array(plan.chunks.counts, "<i4", "chunks.counts", len(rows)).tolist()
    samples = _array(plan.chunks.samples, "<u1", "chunks.samples", len(rows)).tolist()
    return PlanArrays(
        saves=_host_copies(plan.saves, "saves"),
        zero_pages=_array(plan.zero_pages, "<i4", "zero_pages").tolist(),
        copies=_page_copies(plan.copies),
        loads=_host_copies(plan.loads, "loads"),
        started=_started(plan.started),
        appends=list(zip(append_rows, append_pages, strict=True)),
        chunks=[
            Chunk(row=r, start=s, count=c, samples=bool(f))
            for r, s, c, f in zip(rows, starts, counts, samples, strict=True)
        ],
        decode_rows=_array(plan.decode_rows, "<i4", "decode_rows").tolist(),
    )
