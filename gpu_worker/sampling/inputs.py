"""What a step's rows ask of sampling, and logprobs: numpy arrays on the host, tensors on the device. Imports no torch.

Those of every sample are gathered here from `columns`, the parameters of all rows by name: wire/started.py's SETTINGS,
and sample_idx.

Shape legend: S samples, R samples that draw (choose a token randomly; the others are greedy), E samples with changed
logits, G some of the R or S, N entries of a ragged list, P rows with penalties.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import NDArray
from tandem.v1.inference_pb2 import SamplingParams

from gpu_worker.arrays import Array, HostArray, Int64Array, Space
from tandem_contract.limits import limit_of

# If a row's top_k is at most FEW_RANKS, only its FEW_RANKS largest logits are ranked.
FEW_RANKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup(Generic[Array]):
    """Drawing rows that filter by rank in the same way."""

    # int64 [G]: indices into the R rows. None means all rows.
    places: Array | None
    # Whether each row has a top_k of at most FEW_RANKS.
    few: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawInputs(Generic[Array]):
    """The parameters of every sample, padding included; all [S], so that shapes do not depend on what rows ask for."""

    # float32. 0 is greedy; the sample's other entries then have no effect.
    temperature: Array
    # float32; 1 keeps every token.
    top_p: Array
    # float32; 0 keeps every token.
    min_p: Array
    # int64; 0 keeps every token.
    top_k: Array
    # int64: seed, sample_idx and position are the key of the noise. Seeds are unsigned 64-bit numbers, reinterpreted.
    seed: Array
    sample_idx: Array
    # Position of the token to draw.
    position: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs(DrawInputs[Array]):
    """The parameters of the rows that draw; all [R]."""

    # int64: indices into the S samples; the other samples are greedy.
    rows: Array
    # Rows that filter by rank.
    rank_groups: tuple[RankGroup[Array], ...]
    # Whether any row filters by min_p.
    filters_min_p: bool
    # Those that some row uses, in order; their places are indices into the R rows.
    late: tuple["LateFilter[Array]", ...] = ()


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# The filters that `choose` does not have, in the order in which they are applied: every other float of SamplingParams,
# with the value that keeps all tokens. `choice.LATE_FILTERS` has what they do.
LATE_FILTERS: Mapping[str, float] = {
    field.name: limit_of(field).off
    for field in SamplingParams.DESCRIPTOR.fields
    if field.type == FieldDescriptor.TYPE_FLOAT
    and field.name not in (*PENALTIES, *(column.name for column in fields(DrawInputs)))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFilter(Generic[Array]):
    """A filter that `choose` does not have, and who uses it; both arrays [G]."""

    # One of LATE_FILTERS.
    name: str
    # int64: indices into the rows or samples that are filtered.
    places: Array
    # float32: their values of the parameter.
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSamples(Generic[Array]):
    """The drawing samples with late filters."""

    # int64 [n]: indices into the S samples.
    samples: Array
    # Those that some of the n use, in order; their places are indices into the n.
    filters: tuple[LateFilter[Array], ...]


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

    # int64: index into the E samples, and the row of the token history.
    at: Array
    rows: Array
    # int64: tokens of the row, and how many of them are its prompt.
    num_tokens: Array
    num_prompt: Array
    # float32.
    presence: Array
    frequency: Array
    repetition: Array
    # The largest num_tokens.
    max_tokens: int
    # Whether any row has a repetition penalty.
    repeats: bool
    # Whether any row has a presence or frequency penalty.
    counts: bool
    # int64 [n] places and tokens: the tokens to add to the history before the penalties are computed.
    missing: tuple[Array, Array] | None = None
    # int64 [n] places and indices into the S samples: the sampled tokens to add to the history after the step.
    sampled: tuple[Array, Array] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits(Generic[Array]):
    """Every change to the logits of a step."""

    # int64 [E]: indices into the S samples.
    samples: Array
    # int64 [n] twice: indices into the E samples and into the R samples, of the samples that are in both.
    draws: tuple[Array, Array] | None = None
    biases: Biases[Array] | None = None
    penalties: Penalties[Array] | None = None
    # int64 [A], [N], [N]: the E samples that have allowed tokens; pairs of an index into the A and an allowed token.
    allowed: tuple[Array, Array, Array] | None = None
    # int64 [M]: the E samples that must take tokens of a mask. The masks come apart, because they depend on tokens
    # that may not be known when the step begins.
    masked: Array | None = None


# A lower temperature is equivalent to greedy, and logits divided by it would overflow.
MIN_TEMPERATURE = np.float32(1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs(Generic[Array]):
    """Logprobs of m tokens, and the k most probable tokens at the position of each."""

    # float32 [m].
    logprobs: Array
    # int32 and float32 [m, k], most probable first.
    top_token_ids: Array
    top_logprobs: Array


def allocated_draw_inputs(num_samples: int, space: Space) -> DrawInputs[HostArray]:
    """Returns parameters with undefined numbers."""
    floats = {name: space.float32(num_samples) for name in ("temperature", "top_p", "min_p")}
    numbers = {name: space.int64(num_samples) for name in ("top_k", "seed", "sample_idx", "position")}
    return DrawInputs(**floats, **numbers)


def write_draw_inputs(
    out: DrawInputs[HostArray], columns: Mapping[str, HostArray], rows: Int64Array, positions: Int64Array, padding: int
) -> None:
    """Writes the parameters of the samples.

    `rows` [S] are the rows that sample, `positions` [S] those of the tokens to draw. The last `padding` samples are
    filler and count as greedy.
    """
    temperature = columns["temperature"][rows]
    # 0 stays 0.
    np.maximum(temperature, MIN_TEMPERATURE, out=temperature, where=temperature > 0)
    out.temperature[:] = temperature
    if padding:
        out.temperature[-padding:] = 0
    for name in ("top_p", "min_p", "top_k", "sample_idx"):
        getattr(out, name)[:] = columns[name][rows]
    out.seed[:] = columns["seed"].view(np.int64)[rows]
    out.position[:] = positions


def filters_late(columns: Mapping[str, HostArray], rows: Int64Array) -> NDArray[np.bool_]:
    """Returns for each of `rows` [S] whether it draws and has a late filter."""
    uses = np.zeros(rows.size, np.bool_)
    for name, off in LATE_FILTERS.items():
        uses |= columns[name][rows] != off
    return uses & (columns["temperature"][rows] > 0)


def late_filters(columns: Mapping[str, HostArray], rows: Int64Array) -> tuple[LateFilter[HostArray], ...]:
    """Returns the late filters of `rows` [G], which draw."""
    filters: list[LateFilter[HostArray]] = []
    for name, off in LATE_FILTERS.items():
        values = columns[name][rows]
        places = np.flatnonzero(values != off)
        if places.size:
            filters.append(LateFilter(name=name, places=places, values=values[places]))
    return tuple(filters)


def late_samples(columns: Mapping[str, HostArray], rows: Int64Array) -> LateSamples[HostArray] | None:
    """Returns the samples among `rows` [S] that `choose` cannot draw because of a late filter; None if none."""
    samples = np.flatnonzero(filters_late(columns, rows))
    return LateSamples(samples=samples, filters=late_filters(columns, rows[samples])) if samples.size else None
