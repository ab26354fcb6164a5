"""Which positions of a plan have their logits looked at: rows that sample, prompt tokens with logprobs. Host only.

Owns the order of a result's tokens and logprobs, and the limit of such positions. Knows nothing of attention or pages.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.step.edits import EditPart, lay_out_edits
from gpu_worker.step.row_features import Uses
from gpu_worker.step.row_tables import RowTables
from gpu_worker.step.shapes import Shapes, bucket_for
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import Plan

Int64Array = NDArray[np.int64]
_NONE = np.zeros(0, np.int64)

# A row with a top_k up to this has only so many of its tokens ranked.
FEW_RANKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Prompt tokens whose logprobs are told, in the result's order."""

    # int64 [n]: packed token whose logits tell, and the token that follows it.
    tokens: Int64Array
    targets: Int64Array
    top_k: int


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
    # int64: which of the drawing ones filter by rank; by a few ranks, or by as many as it takes.
    few_ranks: Int64Array
    many_ranks: Int64Array
    # int64 [told]: which samples want logprobs, and the most probable tokens beside each.
    told: Int64Array
    top_k: int
    edits: EditPart | None
    prompt: PromptPart | None

    @property
    def kept(self) -> Int64Array:
        """int64 [samples + prompt tokens]: packed tokens whose logits are wanted."""
        return self.tokens if self.prompt is None else np.concatenate([self.tokens, self.prompt.tokens])


def lay_out_samples(plan: Plan, tables: RowTables, num_decode_tokens: int, shapes: Shapes) -> SamplePart:
    """Whose logits `plan` wants, whose decode part has `num_decode_tokens` packed tokens. Raises PlanError."""
    ends = num_decode_tokens + np.cumsum(plan.chunk_counts, dtype=np.int64)
    chunk_rows = plan.chunk_rows[plan.chunk_samples].astype(np.int64)
    decode_rows = plan.decode_rows.astype(np.int64)
    decode_tokens = np.arange(decode_rows.size, dtype=np.int64)
    rows = np.concatenate([chunk_rows, decode_rows])
    tokens = np.concatenate([ends[plan.chunk_samples] - 1, decode_tokens])
    positions = tables.num_known[rows]
    drawing = np.flatnonzero(tables.sampling["temperature"][rows] > 0)
    uses = tables.features.uses[rows]
    few_ranks, many_ranks = _rank_groups(rows[drawing], tables) if drawing.size else (_NONE, _NONE)
    edits, told, top_k = None, _NONE, 0
    if uses.any():
        edits = lay_out_edits(rows, positions, drawing, uses, tables)
        told = np.flatnonzero(uses & Uses.LOGPROBS)
        top_k = int(tables.features.num_logprobs[rows[told]].max(initial=1)) - 1
    prompt = None
    if plan.chunk_rows.size and (tables.features.uses[plan.chunk_rows] & Uses.PROMPT_LOGPROBS).any():
        prompt = _lay_out_prompt(plan, tables, ends - plan.chunk_counts)
    num_samples, limit = rows.size, tables.geometry.logit_rows
    num_prompt = 0 if prompt is None else prompt.tokens.size
    if num_samples + num_prompt > limit:
        raise PlanError(
            f"the plan wants logits of {num_samples} sampled rows and {num_prompt} prompt tokens; logit_rows is {limit}"
        )
    # Steps that tell of prompts have as many logits as it takes; all others, so many as graphs are captured for.
    if shapes.token_multiple is not None and num_samples and prompt is None:
        padding = np.zeros(bucket_for(shapes.decode_buckets, num_samples) - num_samples, np.int64)
        rows, tokens = np.concatenate([rows, padding]), np.concatenate([tokens, padding])
    return SamplePart(
        num_samples=num_samples,
        tokens=tokens,
        rows=rows,
        positions=positions,
        drawing=drawing,
        few_ranks=few_ranks,
        many_ranks=many_ranks,
        told=told,
        top_k=top_k,
        edits=edits,
        prompt=prompt,
    )


def _rank_groups(rows: Int64Array, tables: RowTables) -> tuple[Int64Array, Int64Array]:
    top_k, top_p = tables.sampling["top_k"][rows], tables.sampling["top_p"][rows]
    limited = (top_k > 0) & (top_k < tables.geometry.vocab_size)
    few = limited & (top_k <= FEW_RANKS)
    return np.flatnonzero(few), np.flatnonzero(~few & (limited | (top_p < 1)))


def _lay_out_prompt(plan: Plan, tables: RowTables, first_tokens: Int64Array) -> PromptPart | None:
    """`first_tokens` [chunks]: packed token at which each chunk begins. None: no chunk tells of a prompt token."""
    tokens: list[Int64Array] = []
    targets: list[Int64Array] = []
    top_k, features = 0, tables.features
    for i in np.flatnonzero(features.uses[plan.chunk_rows] & Uses.PROMPT_LOGPROBS).tolist():
        row, start, count = (int(part[i]) for part in (plan.chunk_rows, plan.chunk_starts, plan.chunk_counts))
        # Positions of tokens told; what the token before each says of it.
        first = max(int(features.prompt_logprobs_from[row]), start + 1)
        end = min(start + count + 1, int(features.num_prompt[row]))
        if first < end:
            tokens.append(first_tokens[i] - start + np.arange(first - 1, end - 1))
            targets.append(tables.tokens[row][first:end].astype(np.int64))
            top_k = max(top_k, int(features.num_logprobs[row]) - 1)
    if not tokens:
        return None
    return PromptPart(tokens=np.concatenate(tokens), targets=np.concatenate(targets), top_k=top_k)
