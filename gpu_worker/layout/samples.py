"""Lists the positions of a plan that need logits, and decides which of these logits are changed, and how.

The positions are those of rows that sample, and of prompt tokens with logprobs, in the order of the tokens and logprobs
in the result. `sampling/logits.py` applies the changes; a banned token becomes a bias of minus infinity, which no other
change can raise. The module runs on the host, on numpy arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import Array, HostArray, Int64Array
from gpu_worker.layout.row_tables import Feature, Float64Array, RowTables
from gpu_worker.sampling.inputs import (
    FEW_RANKS,
    MIN_TEMPERATURE,
    PENALTIES,
    Biases,
    DrawInputs,
    LateSamples,
    LogitEdits,
    Penalties,
    RankGroup,
    SamplingInputs,
    late_filters,
    late_samples,
    write_draw_inputs,
)
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import Plan
from tandem_contract.plural import numbered

_AT_EVERY_POSITION = Feature.BIASES | Feature.PENALTIES | Feature.ALLOWED | Feature.CONSTRAINT
# Features that change logits.
EDITS = _AT_EVERY_POSITION | Feature.BANS
_NOWHERE = np.zeros(0, np.int64)


def lay_out_edits(
    rows: Int64Array, positions: Int64Array, drawing: Int64Array, uses: NDArray[np.uint16], tables: RowTables
) -> LogitEdits[HostArray] | None:
    """Returns the changes of logits, or None if no logits change.

    `rows`, `positions` (of the next token) and `uses` are [samples]; `drawing` are the samples that are not greedy.
    """
    features = tables.features
    bans = ((uses & Feature.BANS) != 0) & (positions < features.banned_until[rows])
    edited = np.flatnonzero(bans | ((uses & _AT_EVERY_POSITION) != 0))
    if not edited.size:
        return None
    drawing_idx = np.full(rows.size, -1, np.int64)
    drawing_idx[drawing] = np.arange(drawing.size)
    draws_from = np.flatnonzero(drawing_idx[edited] >= 0)
    lists: list[tuple[int, Int64Array, Float64Array]] = []
    allowed: list[tuple[int, Int64Array]] = []
    entries = zip(edited.tolist(), rows[edited].tolist(), uses[edited].tolist(), strict=True)
    for at, (sample, row, used) in enumerate(entries):
        if used & Feature.BIASES:
            lists.append((at, *features.biases[row]))
        if bans[sample]:
            banned = features.banned[row]
            lists.append((at, banned, np.full(banned.size, -np.inf)))
        if used & Feature.ALLOWED:
            allowed.append((at, features.allowed[row]))
    penalised = np.flatnonzero(uses[edited] & Feature.PENALTIES)
    masked = np.flatnonzero(uses[edited] & Feature.CONSTRAINT)
    return LogitEdits(
        samples=edited,
        draws=(draws_from, drawing_idx[edited[draws_from]]) if draws_from.size else None,
        biases=_biases(lists) if lists else None,
        penalties=_penalties(penalised, edited, rows, positions, tables) if penalised.size else None,
        allowed=_allowed(allowed) if allowed else None,
        masked=masked if masked.size else None,
    )


def _biases(lists: Sequence[tuple[int, Int64Array, Float64Array]]) -> Biases[HostArray]:
    return Biases(
        at=_repeated([at for at, _, _ in lists], [tokens for _, tokens, _ in lists]),
        tokens=np.concatenate([tokens for _, tokens, _ in lists]),
        values=np.concatenate([values for _, _, values in lists]).astype(np.float32),
    )


def _allowed(lists: Sequence[tuple[int, Int64Array]]) -> tuple[Int64Array, Int64Array, Int64Array]:
    tokens = [tokens for _, tokens in lists]
    at = _repeated(range(len(lists)), tokens)
    return np.array([at for at, _ in lists], np.int64), at, np.concatenate(tokens)


def _repeated(values: Sequence[int], lists: Sequence[Int64Array]) -> Int64Array:
    """Repeats each value for every entry of its list."""
    return np.repeat(np.array(values, np.int64), [entries.size for entries in lists])


def _penalties(
    penalised: Int64Array, edited: Int64Array, rows: Int64Array, positions: Int64Array, tables: RowTables
) -> Penalties[HostArray]:
    """Returns the penalties of the samples `edited[penalised]`, and the tokens to add to the token history.

    `missing` has all tokens that a row started with, when it samples for the first time; `sampled` has the token of
    this step.
    """
    features, width = tables.features, tables.geometry.max_length
    kept = edited[penalised]
    kept_rows = rows[kept]
    presence, frequency, repetition = (tables.sampling[name][kept_rows] for name in PENALTIES)
    fresh, missing = kept_rows[tables.num_tokens[kept_rows] == tables.num_started[kept_rows]].tolist(), None
    if fresh:
        places = np.concatenate([row * width + np.arange(int(tables.num_tokens[row])) for row in fresh])
        missing = places, np.concatenate([tables.tokens[row] for row in fresh]).astype(np.int64)
    # A token at position max_length is the last of its sequence, so no later penalty counts it.
    inside = positions[kept] < width
    return Penalties(
        at=penalised,
        rows=kept_rows,
        num_tokens=tables.num_tokens[kept_rows],
        num_prompt=features.num_prompt[kept_rows],
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        max_tokens=int(tables.num_tokens[kept_rows].max()),
        repeats=bool((repetition != 1).any()),
        counts=bool(((presence != 0) | (frequency != 0)).any()),
        missing=missing,
        sampled=(kept_rows[inside] * width + positions[kept[inside]], kept[inside]) if inside.any() else None,
    )


# What `SampleExtras` are for.
_EXTRAS = EDITS | Feature.LOGPROBS | Feature.LATE_FILTERS


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
    # For every sample, if the inputs have room; otherwise those of the rows that draw are extras.
    drawing: DrawInputs[Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleExtras(Generic[Array]):
    """What changes or adds to the sampling of a step."""

    # Without padding, if some row draws and the samples have no parameters.
    drawing: SamplingInputs[Array] | None
    # For samples with parameters, if some row has a late filter.
    late: LateSamples[Array] | None
    edits: LogitEdits[Array] | None
    # int64 [n]: the samples with logprobs. top_k: the number of alternatives of each.
    with_logprobs: Array | None
    top_k: int
    prompt: PromptPart[Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows that sample in a plan, in the order of the result."""

    # int64 [samples].
    rows: Int64Array
    # uint16 [samples]: the features that they use, and those that any of them uses.
    uses: NDArray[np.uint16]
    any_use: int
    prompt: PromptPart[HostArray] | None
    # int64 [n]: where the logits of these prompt tokens are, counted from the first packed token of a chunk.
    prompt_at: Int64Array

    @classmethod
    def of(cls, plan: Plan, tables: RowTables) -> "SampledRows":
        """Those of chunks come first. Raises PlanError if the plan needs more logits than the worker's limit."""
        rows, prompt, prompt_at = plan.decode_rows.astype(np.int64), None, _NOWHERE
        if plan.chunk_rows.size:
            rows = np.concatenate([plan.chunk_rows[plan.chunk_samples].astype(np.int64), rows])
            prompt, prompt_at = _prompt_tokens(plan, tables)
        limit = tables.geometry.logit_rows
        if rows.size + prompt_at.size > limit:
            raise PlanError(
                f"the plan needs logits of {numbered(rows.size, 'sampled row')} and "
                f"{numbered(prompt_at.size, 'prompt token')}; logit_rows is {limit}"
            )
        uses = tables.features.uses[rows]
        return cls(rows=rows, uses=uses, any_use=int(np.bitwise_or.reduce(uses)), prompt=prompt, prompt_at=prompt_at)


def write_samples(
    samples: Samples[HostArray], plan: Plan, sampled: SampledRows, tables: RowTables, num_decode_tokens: int
) -> None:
    """Writes the positions that need logits. `num_decode_tokens`: packed tokens before those of chunks."""
    rows, kept = samples.rows, samples.kept
    num, num_decode = sampled.rows.size, plan.decode_rows.size
    num_chunks = num - num_decode
    rows[:num] = sampled.rows
    rows[num:] = 0
    if num_chunks:
        kept[:num_chunks] = num_decode_tokens + np.cumsum(plan.chunk_counts)[plan.chunk_samples] - 1
    kept[num_chunks:num] = np.arange(num_decode)
    kept[num:] = 0
    if sampled.prompt is not None:
        kept[rows.size :] = num_decode_tokens + sampled.prompt_at
    if samples.drawing is not None:
        write_draw_inputs(samples.drawing, tables.sampling, rows, tables.num_tokens[rows], rows.size - num)


def lay_out_extras(
    sampled: SampledRows, tables: RowTables, samples: Samples[HostArray]
) -> SampleExtras[HostArray] | None:
    """Returns what changes or adds to the sampling of `samples`; None if nothing does."""
    has_parameters = samples.drawing is not None
    if sampled.prompt is None and not sampled.any_use & (_EXTRAS if has_parameters else _EXTRAS | Feature.DRAWS):
        return None
    rows, uses, prompt = sampled.rows, sampled.uses, sampled.prompt
    positions, drawing = tables.num_tokens[rows], np.flatnonzero(uses & Feature.DRAWS)
    inputs = late = edits = with_logprobs = None
    top_k = 0
    if has_parameters:
        late = late_samples(tables.sampling, rows)
    elif drawing.size:
        inputs = _sampling_inputs(drawing, rows[drawing], positions[drawing], tables)
    if sampled.any_use & EDITS:
        edits = lay_out_edits(rows, positions, drawing, uses, tables)
    if sampled.any_use & Feature.LOGPROBS:
        with_logprobs = np.flatnonzero(uses & Feature.LOGPROBS)
        top_k = int(tables.features.num_logprobs[rows[with_logprobs]].max()) - 1
    if all(part is None for part in (inputs, late, edits, with_logprobs, prompt)):
        return None
    return SampleExtras(drawing=inputs, late=late, edits=edits, with_logprobs=with_logprobs, top_k=top_k, prompt=prompt)


def _sampling_inputs(
    drawing: Int64Array, rows: Int64Array, positions: Int64Array, tables: RowTables
) -> SamplingInputs[HostArray]:
    """Returns the parameters of the rows that draw; all [R]. `drawing` are their indices among the samples."""
    sampling = tables.sampling
    top_k, top_p, min_p = sampling["top_k"][rows], sampling["top_p"][rows], sampling["min_p"][rows]
    limited = (top_k > 0) & (top_k < tables.geometry.vocab_size)
    is_few = limited & (top_k <= FEW_RANKS)
    groups = (np.flatnonzero(is_few), True), (np.flatnonzero(~is_few & (limited | (top_p < 1))), False)
    return SamplingInputs(
        rows=drawing,
        temperature=np.maximum(sampling["temperature"][rows], MIN_TEMPERATURE),
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
        late=late_filters(sampling, rows),
    )


def _prompt_tokens(plan: Plan, tables: RowTables) -> tuple[PromptPart[HostArray] | None, Int64Array]:
    """Returns the prompt tokens of the plan that need logits, and where these are, as in `SampledRows`."""
    features = tables.features
    wanted = np.flatnonzero(features.uses[plan.chunk_rows] & Feature.PROMPT_LOGPROBS).tolist()
    if not wanted:
        return None, _NOWHERE
    tokens: list[Int64Array] = []
    targets: list[Int64Array] = []
    top_k, begins = 0, np.cumsum(plan.chunk_counts) - plan.chunk_counts
    for i in wanted:
        row, start, count = (int(part[i]) for part in (plan.chunk_rows, plan.chunk_starts, plan.chunk_counts))
        # The logits of a token give the logprob of the token after it.
        first = max(int(features.prompt_logprobs_from[row]), start + 1)
        end = min(start + count + 1, int(features.num_prompt[row]))
        if first < end:
            tokens.append(begins[i] - start + np.arange(first - 1, end - 1))
            targets.append(tables.tokens[row][first:end].astype(np.int64))
            top_k = max(top_k, int(features.num_logprobs[row]) - 1)
    if not targets:
        return None, _NOWHERE
    return PromptPart(targets=np.concatenate(targets), top_k=top_k), np.concatenate(tokens)
