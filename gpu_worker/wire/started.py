"""Reads StartedRows of worker.proto: rows in full, with their tokens, pages and sampling.

Owns the checks that need no row state. Knows nothing of torch or of rows' state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.wire.fields import Int32Array, PlanError, are_distinct, int32_array, split
from gpu_worker.wire.sampling import GREEDY, MAX_SAMPLING_BYTES, RowSampling, read_sampling

# Of a constraint: SHA-256; zeros stand for none.
_HASH_BYTES = 32
_NO_HASH = bytes(_HASH_BYTES)
# The most alternatives that a plan may ask for beside each token.
MAX_TOP_LOGPROBS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRows:
    """Rows in full, one entry per row. Ragged arrays are cut by their counts."""

    rows: Int32Array
    tokens: Sequence[Int32Array]
    pages: Sequence[Int32Array]
    first_position: Int32Array
    num_prompt_tokens: Int32Array
    sampling: Sequence[RowSampling]
    sample_idx: Int32Array
    banned_until: Int32Array
    banned: Sequence[Int32Array]
    # 0 means none; otherwise 1 + k.
    num_logprobs: Int32Array
    # 0 means none; otherwise the first position of the prompt whose logprob is wanted.
    prompt_logprobs_from: Int32Array
    # The hash of each row's constraint, empty for a row without one; or empty if no row has one.
    constraints: Sequence[bytes] = ()

    @classmethod
    def of_prompts(
        cls,
        rows: Int32Array,
        tokens: Sequence[Int32Array],
        pages: Sequence[Int32Array],
        *,
        sampling: Sequence[RowSampling] | None = None,
        num_logprobs: Int32Array | None = None,
        prompt_logprobs_from: Int32Array | None = None,
    ) -> "StartedRows":
        """Returns rows that have only a prompt and start at its first position. They are greedy by default."""
        zeros = np.zeros(rows.size, np.int32)
        return cls(
            rows=rows,
            tokens=tokens,
            pages=pages,
            first_position=zeros,
            num_prompt_tokens=np.array([prompt.size for prompt in tokens], np.int32),
            sampling=[GREEDY] * rows.size if sampling is None else sampling,
            sample_idx=zeros,
            banned_until=zeros,
            banned=[zeros[:0]] * rows.size,
            num_logprobs=zeros if num_logprobs is None else num_logprobs,
            prompt_logprobs_from=zeros if prompt_logprobs_from is None else prompt_logprobs_from,
        )


def read_started(message: pb.StartedRows, geometry: Geometry) -> StartedRows:
    """Returns the rows' arrays, checked against `geometry`. Raises PlanError."""
    name = "started."
    num = len(message.rows) // 4
    highest = np.iinfo(np.int32).max
    rows = int32_array(message.rows, name + "rows", 1, geometry.max_rows)
    if not are_distinct(geometry.max_rows, rows):
        raise PlanError("a row occurs twice in started.rows")
    num_tokens = int32_array(message.num_tokens, name + "num_tokens", 1, geometry.max_length, num)
    num_pages = int32_array(message.num_pages, name + "num_pages", 0, geometry.pages_per_row, num)
    num_banned = int32_array(message.num_banned, name + "num_banned", 0, geometry.vocab_size, num)
    tokens = int32_array(message.tokens, name + "tokens", 0, geometry.vocab_size - 1, int(num_tokens.sum()))
    # A page behind the window is 0.
    least_page = 0 if geometry.window else 1
    pages = int32_array(message.pages, name + "pages", least_page, geometry.num_pages - 1, int(num_pages.sum()))
    banned = int32_array(message.banned, name + "banned", 0, geometry.vocab_size - 1, int(num_banned.sum()))
    first_position = int32_array(message.first_position, name + "first_position", 0, geometry.max_length - 1, num)
    if (first_position >= num_tokens).any():
        raise PlanError("started.first_position must lie below started.num_tokens")
    if not pages.all():
        _check_absent(rows, pages, num_pages, first_position, geometry)
    num_prompt = int32_array(message.num_prompt_tokens, name + "num_prompt_tokens", 1, geometry.max_length, num)
    if (num_prompt > num_tokens).any():
        raise PlanError("started.num_prompt_tokens must not exceed started.num_tokens")
    logprobs_from = _read_rare(message, "prompt_logprobs_from", geometry.max_length, num)
    if (logprobs_from >= num_prompt).any():
        raise PlanError("started.prompt_logprobs_from must lie below started.num_prompt_tokens")
    return StartedRows(
        rows=rows,
        tokens=split(tokens, num_tokens),
        pages=split(pages, num_pages),
        first_position=first_position,
        num_prompt_tokens=num_prompt,
        sampling=_read_samplings(message, num, geometry.vocab_size),
        sample_idx=int32_array(message.sample_idx, name + "sample_idx", 0, highest, num),
        banned_until=int32_array(message.banned_until, name + "banned_until", 0, highest, num),
        banned=split(banned, num_banned),
        num_logprobs=_read_rare(message, "num_logprobs", 1 + min(geometry.vocab_size, MAX_TOP_LOGPROBS), num),
        prompt_logprobs_from=logprobs_from,
        constraints=_read_constraints(message.constraints, num),
    )


def _read_constraints(data: bytes, num: int) -> Sequence[bytes]:
    if not data:
        return ()
    if len(data) != num * _HASH_BYTES:
        raise PlanError(f"started.constraints has {len(data)} bytes; {num} rows need {num * _HASH_BYTES}")
    hashes = [data[at : at + _HASH_BYTES] for at in range(0, len(data), _HASH_BYTES)]
    return [b"" if found == _NO_HASH else found for found in hashes]


def _read_samplings(message: pb.StartedRows, num: int, vocab_size: int) -> list[RowSampling]:
    """Parses each row's sampling. Rows with equal bytes, such as samples of one request, share one RowSampling."""
    sizes = int32_array(message.num_sampling_bytes, "started.num_sampling_bytes", 0, MAX_SAMPLING_BYTES, num)
    data, ends = message.sampling, np.cumsum(sizes).tolist()
    if len(data) != sizes.sum():
        raise PlanError(f"started.sampling has {len(data)} bytes; num_sampling_bytes makes {sizes.sum()}")
    found: dict[bytes, RowSampling] = {}
    samplings: list[RowSampling] = []
    for i, (end, size) in enumerate(zip(ends, sizes.tolist(), strict=True)):
        own = data[end - size : end]
        if own not in found:
            found[own] = read_sampling(own, f"started.sampling[{i}]", vocab_size)
        samplings.append(found[own])
    return samplings


def _read_rare(message: pb.StartedRows, name: str, high: int, num: int) -> Int32Array:
    """Reads a field that is empty if no row uses it."""
    data = getattr(message, name)
    return int32_array(data, f"started.{name}", 0, high, num) if data else np.zeros(num, np.int32)


def _check_absent(
    rows: Int32Array, pages: Int32Array, num_pages: Int32Array, first_position: Int32Array, geometry: Geometry
) -> None:
    """Checks that each page 0 lies wholly behind the window of the row's next query, and after the sink tokens."""
    of_row = np.repeat(np.arange(rows.size), num_pages)
    col = np.arange(pages.size) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    first_seen = first_position[of_row] - geometry.window + 1
    behind = ((col + 1) * geometry.page_size <= first_seen) & (col * geometry.page_size >= geometry.sink_tokens)
    wrong = np.flatnonzero((pages == 0) & ~behind)
    if wrong.size:
        at = wrong[0]
        raise PlanError(
            f"started.pages holds 0 for page {col[at]} of row {rows[of_row[at]]}, but position "
            f"{first_position[of_row[at]]} sees it: the window is {geometry.window}, sink_tokens {geometry.sink_tokens}"
        )
