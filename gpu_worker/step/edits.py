"""Which samples of a step have their logits changed before a token is chosen, and how, as arrays for the step's copy.

Owns their names and encodings. Host only: numpy, no torch. A banned token travels as a bias of minus infinity, which
no other change can lift.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.step.row_features import Float64Array, Int64Array, Uses
from gpu_worker.step.row_tables import RowTables

_ALWAYS = Uses.BIASES | Uses.PENALTIES | Uses.ALLOWED


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPart:
    """Changes of some samples' logits; see logits.py for what they do."""

    # Every int64 array of it, by its name on the device; those of what nobody asks for are absent.
    arrays: dict[str, Int64Array]
    # The longest history of a row with penalties.
    max_known: int
    # Whether one of them has a repetition penalty; a presence or frequency penalty.
    repeats: bool
    counts: bool


def float_bits(values: NDArray[np.floating]) -> Int64Array:
    """Floats as the bits of float64, for the one int64 buffer."""
    return values.astype(np.float64).view(np.int64)


def lay_out_edits(
    rows: Int64Array, positions: Int64Array, drawing: Int64Array, uses: NDArray[np.uint8], tables: RowTables
) -> EditPart | None:
    """What changes the logits of samples: row, position of the token to come, and `uses`, each [samples].

    `drawing` are those samples that are not greedy. None: nothing changes.
    """
    features = tables.features
    bans = ((uses & Uses.BANS) != 0) & (positions < features.banned_until[rows])
    edited = np.flatnonzero(bans | ((uses & _ALWAYS) != 0))
    if not edited.size:
        return None
    arrays = {"edited": edited}
    place = np.full(rows.size, -1, np.int64)
    place[drawing] = np.arange(drawing.size)
    draws_from = np.flatnonzero(place[edited] >= 0)
    draws_to = place[edited[draws_from]]
    if draws_from.size:
        arrays["edited_draws_from"], arrays["edited_draws_to"] = draws_from, draws_to
    lists: list[tuple[int, Int64Array, Float64Array]] = []
    allowed: list[tuple[int, Int64Array]] = []
    owners = zip(edited.tolist(), rows[edited].tolist(), uses[edited].tolist(), strict=True)
    for at, (sample, row, asked) in enumerate(owners):
        if asked & Uses.BIASES:
            lists.append((at, *features.biases[row]))
        if bans[sample]:
            banned = features.banned[row]
            lists.append((at, banned, np.full(banned.size, -np.inf)))
        if asked & Uses.ALLOWED:
            allowed.append((at, features.allowed[row]))
    if lists:
        arrays["biased_at"] = _owners([item[0] for item in lists], [item[1] for item in lists])
        arrays["biased_tokens"] = np.concatenate([item[1] for item in lists])
        arrays["biases"] = float_bits(np.concatenate([item[2] for item in lists]))
    if allowed:
        arrays["restricted"] = np.array([at for at, _ in allowed], np.int64)
        arrays["allowed_at"] = _owners(list(range(len(allowed))), [tokens for _, tokens in allowed])
        arrays["allowed_tokens"] = np.concatenate([tokens for _, tokens in allowed])
    penalised = np.flatnonzero(uses[edited] & Uses.PENALTIES)
    own = rows[edited[penalised]]
    if penalised.size:
        arrays |= _penalties(penalised, edited, own, positions, tables)
    return EditPart(
        arrays=arrays,
        max_known=int(tables.num_known[own].max(initial=0)),
        repeats=bool((features.repetition_penalty[own] != 1).any()),
        counts=bool(((features.presence_penalty[own] != 0) | (features.frequency_penalty[own] != 0)).any()),
    )


def _owners(owners: Sequence[int], lists: Sequence[Int64Array]) -> Int64Array:
    return np.repeat(np.array(owners, np.int64), [part.size for part in lists])


def _penalties(
    penalised: Int64Array, edited: Int64Array, rows: Int64Array, positions: Int64Array, tables: RowTables
) -> dict[str, Int64Array]:
    """The penalties of `rows` at places `penalised` among the edited, and what the tokens' history lacks of them.

    A row's tokens are written when it first samples; what is sampled since, right after its step.
    """
    features, width = tables.features, tables.geometry.max_length
    arrays = {
        "penalised": penalised,
        "penalised_rows": rows,
        "penalised_known": tables.num_known[rows],
        "penalised_prompt": features.num_prompt[rows],
        "presence_penalty": float_bits(features.presence_penalty[rows]),
        "frequency_penalty": float_bits(features.frequency_penalty[rows]),
        "repetition_penalty": float_bits(features.repetition_penalty[rows]),
    }
    fresh = rows[tables.num_known[rows] == tables.num_started[rows]].tolist()
    if fresh:
        arrays["history_places"] = np.concatenate([row * width + np.arange(tables.num_known[row]) for row in fresh])
        arrays["history_tokens"] = np.concatenate([tables.tokens[row] for row in fresh]).astype(np.int64)
    # A token at max_length is a sequence's last: nobody counts it any more.
    kept = edited[penalised]
    inside = positions[kept] < width
    if inside.any():
        arrays["remembered"] = kept[inside]
        arrays["remembered_places"] = rows[inside] * width + positions[kept[inside]]
    return arrays
