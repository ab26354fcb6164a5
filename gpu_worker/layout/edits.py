"""Decides which logits of a step are changed before a token is chosen, and how.

`sampling/logits.py` applies the changes. It runs on the host, on numpy arrays. A banned token becomes a bias of
minus infinity, which no other change can raise.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import HostArray, Int64Array
from gpu_worker.layout.row_features import Feature, Float64Array
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.sampling.inputs import Biases, LogitEdits, Penalties

_AT_EVERY_POSITION = Feature.BIASES | Feature.PENALTIES | Feature.ALLOWED | Feature.CONSTRAINT
# Features that change logits.
EDITS = _AT_EVERY_POSITION | Feature.BANS


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
    own = rows[kept]
    presence, frequency, repetition = (
        values[own].astype(np.float32)
        for values in (features.presence_penalty, features.frequency_penalty, features.repetition_penalty)
    )
    fresh = own[tables.num_tokens[own] == tables.num_started[own]].tolist()
    # A token at position max_length is the last of its sequence, so no later penalty counts it.
    inside = positions[kept] < width
    return Penalties(
        at=penalised,
        rows=own,
        num_tokens=tables.num_tokens[own],
        num_prompt=features.num_prompt[own],
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        max_tokens=int(tables.num_tokens[own].max()),
        repeats=bool((repetition != 1).any()),
        counts=bool(((presence != 0) | (frequency != 0)).any()),
        missing=(
            np.concatenate([row * width + np.arange(int(tables.num_tokens[row])) for row in fresh]),
            np.concatenate([tables.tokens[row] for row in fresh]).astype(np.int64),
        )
        if fresh
        else None,
        sampled=(own[inside] * width + positions[kept[inside]], kept[inside]) if inside.any() else None,
    )
