"""Which rows of a plan sample, where their logits stand, and what they ask for, as arrays. Host only: numpy, no torch.

Owns the order of a result's tokens. Knows nothing of attention or pages.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpu_worker.shapes import Shapes, bucket_for
from gpu_worker.slots import RowTables
from gpu_worker.wire import Plan

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """Rows whose next token comes out, in the result's order; padded with row 0 and token 0."""

    num_samples: int
    # int64 [samples]: packed token whose logits decide, and the row that gets the token.
    tokens: Int64Array
    rows: Int64Array
    # int64 [num_samples]: position of the token to be sampled.
    positions: Int64Array
    # int64 [drawing]: which samples are not greedy.
    drawing: Int64Array
    # int64 [n]: pairs of sample and token that may not come out.
    banned_samples: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    banned_tokens: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))


def lay_out_samples(plan: Plan, tables: RowTables, num_decode_tokens: int, shapes: Shapes) -> SamplePart:
    """Whose next token comes out of `plan`, whose decode part has `num_decode_tokens` packed tokens."""
    ends = num_decode_tokens + np.cumsum(plan.chunk_counts, dtype=np.int64)
    chunk_rows = plan.chunk_rows[plan.chunk_samples].astype(np.int64)
    decode_rows = plan.decode_rows.astype(np.int64)
    decode_tokens = np.arange(decode_rows.size, dtype=np.int64)
    rows = np.concatenate([chunk_rows, decode_rows])
    tokens = np.concatenate([ends[plan.chunk_samples] - 1, decode_tokens])
    positions = tables.num_known[rows]
    drawing = np.flatnonzero(tables.sampling["temperature"][rows] > 0)
    banned = [
        (np.full(tables.banned[int(rows[i])].size, i), tables.banned[int(rows[i])])
        for i in np.flatnonzero(positions < tables.sampling["banned_until"][rows])
    ]
    num_samples = rows.size
    if shapes.token_multiple is not None and num_samples:
        padding = np.zeros(bucket_for(shapes.decode_buckets, num_samples) - num_samples, np.int64)
        rows, tokens = np.concatenate([rows, padding]), np.concatenate([tokens, padding])
    return SamplePart(
        num_samples=num_samples,
        tokens=tokens,
        rows=rows,
        positions=positions,
        drawing=drawing,
        banned_samples=np.concatenate([pair[0] for pair in banned] or [np.zeros(0, np.int64)]),
        banned_tokens=np.concatenate([pair[1] for pair in banned] or [np.zeros(0, np.int64)]).astype(np.int64),
    )
