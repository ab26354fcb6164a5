"""Lists the positions of a plan that need logits: those of rows that sample, and of prompt tokens with logprobs.

Their order is the order of the tokens and logprobs in the result. The module runs on the host, on numpy arrays.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np

from gpu_worker.arrays import Array, HostArray, Int64Array
from gpu_worker.sampling.inputs import FEW_RANKS, LogitEdits, RankGroup, SamplingInputs
from gpu_worker.step.edits import lay_out_edits
from gpu_worker.step.row_features import Feature
from gpu_worker.step.row_tables import RowTables
from gpu_worker.step.shapes import Shapes, bucket_for
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import Plan

# A lower temperature is equivalent to greedy, and logits divided by it would overflow.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart(Generic[Array]):
    """Prompt tokens with logprobs, in the order of the result."""

    # int64 [n]: the tokens.
    targets: Array
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart(Generic[Array]):
    """Rows that sample a token, in the order of the result."""

    # Without padding.
    num_samples: int
    # int64 [samples + prompt tokens]: packed tokens that need logits; padded samples take token 0.
    kept: Array
    # int64 [samples]: the row that each sampled token belongs to; padding is row 0.
    rows: Array
    # None if every row is greedy.
    drawing: SamplingInputs[Array] | None
    edits: LogitEdits[Array] | None
    # int64 [n]: the samples with logprobs. top_k: the number of alternatives of each.
    with_logprobs: Array | None
    top_k: int
    prompt: PromptPart[Array] | None


def lay_out_samples(plan: Plan, tables: RowTables, num_decode_tokens: int, shapes: Shapes) -> SamplePart[HostArray]:
    """Returns the positions of `plan` that need logits. Its decode part has `num_decode_tokens` tokens with padding.

    Raises PlanError if the positions exceed the worker's limit.
    """
    ends = num_decode_tokens + np.cumsum(plan.chunk_counts, dtype=np.int64)
    chunk_rows = plan.chunk_rows[plan.chunk_samples].astype(np.int64)
    decode_rows = plan.decode_rows.astype(np.int64)
    rows = np.concatenate([chunk_rows, decode_rows])
    kept = np.concatenate([ends[plan.chunk_samples] - 1, np.arange(decode_rows.size, dtype=np.int64)])
    positions = tables.num_tokens[rows]
    drawing = np.flatnonzero(tables.sampling["temperature"][rows] > 0)
    uses = tables.features.uses[rows]
    edits, with_logprobs, top_k = None, None, 0
    if uses.any():
        edits = lay_out_edits(rows, positions, drawing, uses, tables)
        wanted = np.flatnonzero(uses & Feature.LOGPROBS)
        if wanted.size:
            with_logprobs, top_k = wanted, int(tables.features.num_logprobs[rows[wanted]].max()) - 1
    inputs = _sampling_inputs(drawing, rows[drawing], positions[drawing], tables) if drawing.size else None
    num_samples, limit = rows.size, tables.geometry.logit_rows
    prompt_tokens, prompt = _lay_out_prompt(plan, tables, ends - plan.chunk_counts)
    if num_samples + prompt_tokens.size > limit:
        raise PlanError(
            f"the plan needs logits of {num_samples} sampled rows and {prompt_tokens.size} prompt tokens; "
            f"logit_rows is {limit}"
        )
    if prompt is not None:
        kept = np.concatenate([kept, prompt_tokens])
    elif shapes.token_multiple is not None and num_samples:
        # A fixed number of logits, so that CUDA graphs can be added later.
        padding = np.zeros(bucket_for(shapes.decode_buckets, num_samples) - num_samples, np.int64)
        rows, kept = np.concatenate([rows, padding]), np.concatenate([kept, padding])
    return SamplePart(
        num_samples=num_samples,
        kept=kept,
        rows=rows,
        drawing=inputs,
        edits=edits,
        with_logprobs=with_logprobs,
        top_k=top_k,
        prompt=prompt,
    )


def _sampling_inputs(
    drawing: Int64Array, rows: Int64Array, positions: Int64Array, tables: RowTables
) -> SamplingInputs[HostArray]:
    """Returns the parameters of the rows that draw; all [R]. `drawing` are their indices among the samples."""
    sampling = tables.sampling
    top_k, top_p, min_p = sampling["top_k"][rows], sampling["top_p"][rows], sampling["min_p"][rows]
    typical_p = sampling["typical_p"][rows]
    typical = np.flatnonzero(typical_p < 1)
    limited = (top_k > 0) & (top_k < tables.geometry.vocab_size)
    is_few = limited & (top_k <= FEW_RANKS)
    groups = (np.flatnonzero(is_few), True), (np.flatnonzero(~is_few & (limited | (top_p < 1))), False)
    return SamplingInputs(
        rows=drawing,
        temperature=np.maximum(sampling["temperature"][rows], np.float32(_MIN_TEMPERATURE)),
        top_p=top_p,
        min_p=min_p,
        top_k=top_k.astype(np.int64),
        seed=sampling["seed"][rows].view(np.int64),
        sample_idx=sampling["sample_idx"][rows].astype(np.int64),
        position=positions,
        # None means all rows.
        rank_groups=tuple(
            RankGroup(places=places if places.size < rows.size else None, few=few)
            for places, few in groups
            if places.size
        ),
        filters_min_p=bool((min_p > 0).any()),
        typical=(typical, typical_p[typical]) if typical.size else None,
    )


def _lay_out_prompt(
    plan: Plan, tables: RowTables, first_tokens: Int64Array
) -> tuple[Int64Array, PromptPart[HostArray] | None]:
    """Returns the packed tokens whose logits give prompt logprobs, and those prompt tokens, or None if there are none.

    `first_tokens` [chunks] are the packed tokens at which the chunks begin.
    """
    tokens: list[Int64Array] = [np.zeros(0, np.int64)]
    targets: list[Int64Array] = []
    top_k, features = 0, tables.features
    for i in np.flatnonzero(features.uses[plan.chunk_rows] & Feature.PROMPT_LOGPROBS).tolist():
        row, start, count = (int(part[i]) for part in (plan.chunk_rows, plan.chunk_starts, plan.chunk_counts))
        # The logits of a token give the logprob of the token after it.
        first = max(int(features.prompt_logprobs_from[row]), start + 1)
        end = min(start + count + 1, int(features.num_prompt[row]))
        if first < end:
            tokens.append(first_tokens[i] - start + np.arange(first - 1, end - 1))
            targets.append(tables.tokens[row][first:end].astype(np.int64))
            top_k = max(top_k, int(features.num_logprobs[row]) - 1)
    prompt = PromptPart(targets=np.concatenate(targets), top_k=top_k) if targets else None
    return np.concatenate(tokens), prompt
