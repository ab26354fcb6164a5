"""Lists the positions of a plan that need logits: those of rows that sample, and of prompt tokens with logprobs.

Their order is the order of the tokens and logprobs in the result. The module runs on the host, on numpy arrays.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np

from gpu_worker.arrays import Array, HostArray, Int64Array
from gpu_worker.sampling.inputs import FEW_RANKS, DrawInputs, LogitEdits, RankGroup, SamplingInputs
from gpu_worker.step.edits import is_edited, lay_out_edits
from gpu_worker.step.row_features import Feature
from gpu_worker.step.row_tables import RowTables
from gpu_worker.step.shapes import StepShape
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
class Samples(Generic[Array]):
    """Rows that sample a token, in the order of the result."""

    # int64 [samples + prompt tokens]: packed tokens that need logits; padded samples take token 0.
    kept: Array
    # int64 [samples]: the row that each sampled token belongs to; padding is row 0.
    rows: Array
    # Of every sample, in padded steps in which some row draws; otherwise None.
    drawing: DrawInputs[Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleExtras(Generic[Array]):
    """What changes or adds to the sampling of a step."""

    # int64 [n]: the samples whose tokens `drawing` and `edits` decide. None: all of them.
    special: Array | None
    # The parameters of those that draw, and the changes of their logits. Indices count the special samples.
    drawing: SamplingInputs[Array] | None
    edits: LogitEdits[Array] | None
    # int64 [n]: the samples with logprobs. top_k: the number of alternatives of each.
    with_logprobs: Array | None
    top_k: int
    prompt: PromptPart[Array] | None


def draws(plan: Plan, tables: RowTables) -> bool:
    """Whether any row that samples in this plan is not greedy."""
    temperature = tables.sampling["temperature"]
    rows = plan.chunk_rows[plan.chunk_samples]
    return bool((temperature[plan.decode_rows] > 0).any() or (temperature[rows] > 0).any())


def lay_out_samples(
    plan: Plan, tables: RowTables, shape: StepShape, *, is_padded: bool
) -> tuple[Samples[HostArray], SampleExtras[HostArray] | None]:
    """Returns the positions of `plan` that need logits, and what is special about some of them, or None.

    In a padded step `Samples` decides the tokens of all samples but the special ones. Raises PlanError if the positions
    exceed the worker's limit.
    """
    num_decode_tokens = shape.decode if is_padded else plan.decode_rows.size
    ends = num_decode_tokens + np.cumsum(plan.chunk_counts, dtype=np.int64)
    chunk_rows = plan.chunk_rows[plan.chunk_samples].astype(np.int64)
    decode_rows = plan.decode_rows.astype(np.int64)
    rows = np.concatenate([chunk_rows, decode_rows])
    kept = np.concatenate([ends[plan.chunk_samples] - 1, np.arange(decode_rows.size, dtype=np.int64)])
    prompt_tokens, prompt = _lay_out_prompt(plan, tables, ends - plan.chunk_counts)
    limit = tables.geometry.logit_rows
    if rows.size + prompt_tokens.size > limit:
        raise PlanError(
            f"the plan needs logits of {rows.size} sampled rows and {prompt_tokens.size} prompt tokens; "
            f"logit_rows is {limit}"
        )
    extras = _lay_out_extras(rows, tables, prompt, is_padded=is_padded)
    positions, drawing = tables.num_tokens[rows], None
    if is_padded:
        padding = np.zeros(shape.samples - rows.size, np.int64)
        if shape.draws:
            drawing = _draw_inputs(rows, positions, padding, tables)
        rows, kept = np.concatenate([rows, padding]), np.concatenate([kept, padding])
    return Samples(kept=np.concatenate([kept, prompt_tokens]), rows=rows, drawing=drawing), extras


def _lay_out_extras(
    rows: Int64Array, tables: RowTables, prompt: PromptPart[HostArray] | None, *, is_padded: bool
) -> SampleExtras[HostArray] | None:
    positions, uses = tables.num_tokens[rows], tables.features.uses[rows]
    special = None
    if is_padded:
        special = np.flatnonzero(is_edited(rows, positions, uses, tables) | (tables.sampling["typical_p"][rows] < 1))
        rows_of, positions, uses_of = rows[special], positions[special], uses[special]
    else:
        rows_of, uses_of = rows, uses
    drawing = np.flatnonzero(tables.sampling["temperature"][rows_of] > 0)
    edits, with_logprobs, top_k = None, None, 0
    if uses.any():
        edits = lay_out_edits(rows_of, positions, drawing, uses_of, tables)
        wanted = np.flatnonzero(uses & Feature.LOGPROBS)
        if wanted.size:
            with_logprobs, top_k = wanted, int(tables.features.num_logprobs[rows[wanted]].max()) - 1
    if is_padded and not special.size and with_logprobs is None and prompt is None:
        return None
    return SampleExtras(
        special=special,
        drawing=_sampling_inputs(drawing, rows_of[drawing], positions[drawing], tables) if drawing.size else None,
        edits=edits,
        with_logprobs=with_logprobs,
        top_k=top_k,
        prompt=prompt,
    )


def _draw_inputs(
    rows: Int64Array, positions: Int64Array, padding: Int64Array, tables: RowTables
) -> DrawInputs[HostArray]:
    """Returns the parameters of all samples; padding is greedy."""
    sampling, padded = tables.sampling, np.concatenate([rows, padding])
    temperature = sampling["temperature"][padded]
    temperature[rows.size :] = 0
    return DrawInputs(
        temperature=np.where(temperature > 0, np.maximum(temperature, np.float32(_MIN_TEMPERATURE)), np.float32(0)),
        top_p=sampling["top_p"][padded],
        min_p=sampling["min_p"][padded],
        top_k=sampling["top_k"][padded].astype(np.int64),
        seed=sampling["seed"][padded].view(np.int64),
        sample_idx=sampling["sample_idx"][padded].astype(np.int64),
        position=np.concatenate([positions, padding]),
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
