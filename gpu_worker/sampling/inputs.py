"""What a step's rows request of sampling: numpy arrays when the host lays a step out, tensors on the device.

Owns these types. Imports no torch, so that the host's layout needs none. Shape legend: S samples, R those of them that
draw, E those with changed logits, G some of the R, N entries of a ragged list, P rows with penalties.
"""

from dataclasses import dataclass
from typing import Generic

from gpu_worker.arrays import Array

# A row with a top_k up to this has only its FEW_RANKS largest logits ranked.
FEW_RANKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup(Generic[Array]):
    """Drawing rows that filter by rank in the same way."""

    # int64 [G]: indices into the R rows. None: all of them.
    places: Array | None
    # Whether each has a top_k of at most FEW_RANKS.
    few: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs(Generic[Array]):
    """The parameters of the rows that draw; all [R]."""

    # int64: indices into the S samples; the other samples are greedy.
    rows: Array
    # float32.
    temperature: Array
    top_p: Array
    min_p: Array
    # int64.
    top_k: Array
    # int64: the noise's key. Seeds are unsigned 64-bit numbers, reinterpreted.
    seed: Array
    sample_idx: Array
    # Position of the token to be drawn.
    position: Array
    # Rows that filter by rank.
    rank_groups: tuple[RankGroup[Array], ...]
    # Whether any row filters by min_p.
    filters_min_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases(Generic[Array]):
    """Values added to single logits; minus infinity bans a token. All [N]."""

    # int64: index into the E samples, and token.
    at: Array
    tokens: Array
    # float32.
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties(Generic[Array]):
    """Penalties on the tokens that a row already has; all [P]."""

    # int64: index into the E samples, and the row with the history that counts.
    at: Array
    rows: Array
    # int64: tokens of the row, and how many of them are its prompt.
    num_known: Array
    num_prompt: Array
    # float32.
    presence: Array
    frequency: Array
    repetition: Array
    # The largest num_known.
    max_known: int
    # Whether any row has a repetition penalty; a presence or frequency penalty.
    repeats: bool
    counts: bool
    # int64 [n] places and tokens: tokens that the history lacks and that it gets before the penalties are computed.
    missing: tuple[Array, Array] | None = None
    # int64 [n] places and indices into the S samples: sampled tokens that the history gets after the step.
    sampled: tuple[Array, Array] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits(Generic[Array]):
    """Every change to the logits of a step."""

    # int64 [E]: indices into the S samples.
    samples: Array
    # int64 [n] twice: those of the E samples that draw, and their places among the R.
    draws: tuple[Array, Array] | None = None
    biases: Biases[Array] | None = None
    penalties: Penalties[Array] | None = None
    # int64 [A], [N], [N]: those of the E samples with restricted tokens; index into the A and an allowed token.
    allowed: tuple[Array, Array, Array] | None = None
