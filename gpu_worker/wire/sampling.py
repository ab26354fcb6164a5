"""Reads how a row samples: a serialized SamplingParams that must be complete and within the sampler's ranges.

Owns the settings that every row has, and their ranges. The front end makes the bytes, and refuses what callers may not
ask for. The ranges here only keep a malformed plan from breaking the worker. Knows nothing of rows' state or torch.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tandem.v1 import inference_pb2 as pb

from gpu_worker.wire.fields import PlanError

# A larger penalty or bias has no other effect.
_MAX_EDIT = 1e6
# Per row; the scheduler has the same limit per request.
MAX_SAMPLING_BYTES = 96 << 10
# The limit of each list: biased, allowed, banned.
MAX_LISTED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that every row has: its lowest and highest value, and the dtype of its column in the row tables."""

    low: float
    high: float
    dtype: type[np.generic] = np.float64


# By their names in SamplingParams.
SETTINGS = {
    "temperature": Setting(0, 1e6, np.float32),
    "top_p": Setting(0, 1, np.float32),
    "top_k": Setting(0, (1 << 32) - 1, np.int64),
    "min_p": Setting(0, 1, np.float32),
    "typical_p": Setting(0, 1, np.float32),
    "seed": Setting(0, (1 << 64) - 1, np.uint64),
    "presence_penalty": Setting(-_MAX_EDIT, _MAX_EDIT),
    "frequency_penalty": Setting(-_MAX_EDIT, _MAX_EDIT),
    "repetition_penalty": Setting(1e-6, _MAX_EDIT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """`settings` has a value for each of SETTINGS. An empty `allowed` allows every token."""

    settings: pb.SamplingParams
    # Tokens, and the number added to the logit of each. Minus infinity bans a token.
    biased: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    biases: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    allowed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def but(self, **settings: float) -> "RowSampling":
        """Returns a copy with these settings changed."""
        changed = pb.SamplingParams()
        changed.CopyFrom(self.settings)
        for name, value in settings.items():
            setattr(changed, name, value)
        return replace(self, settings=changed)


# The meaning of empty bytes.
GREEDY = RowSampling(
    settings=pb.SamplingParams(
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        typical_p=1,
        seed=0,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
    )
)


# A row that uses every setting, for the plan that measures the largest step. Its top_p is so near 1 that few ranks do
# not settle it.
EVERYTHING = replace(
    GREEDY.but(
        temperature=1,
        top_p=0.9999,
        min_p=0.1,
        typical_p=0.9,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=1.5,
    ),
    biased=np.zeros(1, np.int64),
    biases=np.ones(1),
)


def read_sampling(data: bytes, name: str, vocab_size: int) -> RowSampling:
    """Parses `data`. Raises PlanError if it is malformed, incomplete or out of range."""
    if not data:
        return GREEDY
    params = pb.SamplingParams()
    try:
        params.ParseFromString(data)
    except DecodeError as error:
        raise PlanError(f"{name} is not a SamplingParams: {error}") from None
    num_bytes = params.ByteSize()
    params.DiscardUnknownFields()
    if params.ByteSize() != num_bytes:
        raise PlanError(f"{name} has a field that this worker does not know")
    has: Callable[[str], bool] = params.HasField  # type: ignore[assignment]
    for setting, limits in SETTINGS.items():
        value = getattr(params, setting)
        if not has(setting):
            raise PlanError(f"{name}.{setting} is missing")
        if not limits.low <= value <= limits.high:
            raise PlanError(f"{name}.{setting} is {value}; it must be {limits.low} to {limits.high}")
    return RowSampling(settings=params, **_read_lists(params, name, vocab_size))


def _read_lists(params: pb.SamplingParams, name: str, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Returns `biased`, `biases` and `allowed`, or nothing for the many rows that have none of them."""
    restricts = params.HasField("allowed_token_ids")
    if not (restricts or params.logit_bias or params.banned_token_ids):
        return {}
    allowed = _tokens(params.allowed_token_ids.ids, f"{name}.allowed_token_ids", vocab_size)
    if restricts and not allowed.size:
        raise PlanError(f"{name}.allowed_token_ids is empty")
    biased = _tokens(params.logit_bias, f"{name}.logit_bias", vocab_size)
    biases = np.fromiter(params.logit_bias.values(), np.float64, biased.size)
    inside = np.abs(biases) <= _MAX_EDIT
    if not inside.all():
        raise PlanError(f"{name}.logit_bias contains {biases[~inside][0]}; it must be {-_MAX_EDIT} to {_MAX_EDIT}")
    banned = _tokens(params.banned_token_ids, f"{name}.banned_token_ids", vocab_size)
    return {
        "biased": np.concatenate([biased, banned]),
        "biases": np.concatenate([biases, np.full(banned.size, -np.inf)]),
        "allowed": allowed,
    }


def _tokens(ids: Collection[int], name: str, vocab_size: int) -> NDArray[np.int64]:
    if len(ids) > MAX_LISTED_TOKENS:
        raise PlanError(f"{name} has {len(ids)} tokens; the limit is {MAX_LISTED_TOKENS}")
    tokens = np.fromiter(ids, np.int64, len(ids))
    if tokens.size and tokens.max() >= vocab_size:
        raise PlanError(f"{name} contains {tokens.max()}; it must be 0 to {vocab_size - 1}")
    return tokens
