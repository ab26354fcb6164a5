"""Reads StartedRows of worker.proto: rows in full, with their tokens, their pages and how they sample.

Owns the checks that need no row state, the settings that every row has, and their ranges. The front end makes a row's
SamplingParams, and refuses what callers may not ask for; the same limits here keep a malformed plan from breaking the
worker. Knows nothing of rows' state or torch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb
from tandem.v1.inference_pb2 import SamplingParams

from gpu_worker.geometry import Geometry
from gpu_worker.sampling.inputs import LATE_FILTERS
from gpu_worker.wire.fields import Int32Array, PlanError, are_distinct, int32_array, split
from tandem_contract.limits import limit_at, limit_of
from tandem_contract.plural import numbered

# Per row; the scheduler has the same limit per request.
MAX_SAMPLING_BYTES = 96 << 10
# The limit of each list: biased, allowed, banned.
MAX_LISTED_TOKENS = limit_at(SamplingParams, "banned_token_ids").entries
_BIAS = limit_at(SamplingParams, "logit_bias")


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that every row has: its bounds, its value in a greedy row, and its dtype in the row tables."""

    low: float
    high: float
    greedy: float
    dtype: type[np.generic]


_WHOLE = {
    FieldDescriptor.TYPE_UINT32: ((1 << 32) - 1, np.int64),
    FieldDescriptor.TYPE_UINT64: ((1 << 64) - 1, np.uint64),
}


def _setting(field: FieldDescriptor) -> Setting | None:
    """The limits that the front end checks; of whole numbers, which may depend on the model, those of their type."""
    limit = limit_of(field)
    greedy = 0 if field.name == "temperature" else limit.off
    if field.type == FieldDescriptor.TYPE_FLOAT:
        low = limit.above if limit.HasField("above") else limit.least
        return Setting(float(np.float32(low)), float(np.float32(limit.most)), greedy, np.float32)
    if field.type not in _WHOLE or field.is_repeated:
        return None
    most, dtype = _WHOLE[field.type]
    return Setting(0, most, int(greedy), dtype)


# Every number of SamplingParams, by name, but num_samples, which the core has.
SETTINGS: dict[str, Setting] = {
    field.name: setting
    for field in SamplingParams.DESCRIPTOR.fields
    if (setting := _setting(field)) is not None and field.name != "num_samples"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """`settings` has a value for each of SETTINGS. An empty `allowed` allows every token."""

    settings: SamplingParams
    # Tokens, and the number added to the logit of each. Minus infinity bans a token.
    biased: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    biases: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    allowed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def but(self, **settings: float) -> "RowSampling":
        changed = SamplingParams()
        changed.CopyFrom(self.settings)
        for name, value in settings.items():
            setattr(changed, name, value)
        return replace(self, settings=changed)


# The meaning of empty bytes, and of a setting that is absent: the scheduler is older than it, or leaves it at off.
_greedy: dict[str, Any] = {name: setting.greedy for name, setting in SETTINGS.items()}
GREEDY = RowSampling(settings=SamplingParams(**_greedy))
# A row that uses every setting, for the plan that measures the largest step. Its top_p is so near 1 that few ranks do
# not settle it; late filters have half of what is possible.
EVERYTHING = replace(
    GREEDY.but(
        temperature=1,
        top_p=0.9999,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=1.5,
        **{name: (SETTINGS[name].low + SETTINGS[name].high) / 2 for name in LATE_FILTERS},
    ),
    biased=np.zeros(1, np.int64),
    biases=np.ones(1),
)


def read_sampling(data: bytes, name: str, vocab_size: int) -> RowSampling:
    """Parses `data`. Raises PlanError if it is malformed or out of range."""
    if not data:
        return GREEDY
    params = SamplingParams()
    params.CopyFrom(GREEDY.settings)
    try:
        params.MergeFromString(data)
    except DecodeError as error:
        raise PlanError(f"{name} is not a SamplingParams: {error}") from None
    num_bytes = params.ByteSize()
    params.DiscardUnknownFields()
    if params.ByteSize() != num_bytes:
        raise PlanError(f"{name} has a field that this worker does not know")
    for setting, limits in SETTINGS.items():
        value = getattr(params, setting)
        if not limits.low <= value <= limits.high:
            raise PlanError(f"{name}.{setting} is {value}; it must be {limits.low:g} to {limits.high:g}")
    return RowSampling(settings=params, **_read_lists(params, name, vocab_size))


def _read_lists(params: SamplingParams, name: str, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Returns `biased`, `biases` and `allowed`, or nothing for the many rows that have none of them."""
    restricts = params.HasField("allowed_token_ids")
    if not (restricts or params.logit_bias or params.banned_token_ids):
        return {}
    allowed = _tokens(params.allowed_token_ids.ids, f"{name}.allowed_token_ids", vocab_size)
    if restricts and not allowed.size:
        raise PlanError(f"{name}.allowed_token_ids is empty")
    biased = _tokens(params.logit_bias, f"{name}.logit_bias", vocab_size)
    biases = np.fromiter(params.logit_bias.values(), np.float64, biased.size)
    inside = (biases >= _BIAS.least) & (biases <= _BIAS.most)
    if not inside.all():
        raise PlanError(
            f"{name}.logit_bias contains {biases[~inside][0]}; it must be {_BIAS.least:g} to {_BIAS.most:g}"
        )
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


# The hash of a constraint: SHA-256; zeros stand for none.
_HASH_BYTES = 32
_NO_HASH = bytes(_HASH_BYTES)
# The most alternatives that a plan may ask for beside each token.
MAX_TOP_LOGPROBS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRows:
    """Rows in full, one entry per row. Ragged arrays are cut by their counts."""

    rows: Int32Array
    tokens: Sequence[Int32Array]
    pages: Sequence[Int32Array]
    first_position: Int32Array
    num_prompt_tokens: Int32Array
    sampling: Sequence[RowSampling]
    sample_idx: Int32Array
    banned_until: Int32Array
    banned: Sequence[Int32Array]
    # 0 means none; otherwise 1 + k.
    num_logprobs: Int32Array
    # 0 means none; otherwise the first position of the prompt with a wanted logprob.
    prompt_logprobs_from: Int32Array
    # The hash of each row's constraint, empty for a row without one; or empty if no row has one.
    constraints: Sequence[bytes] = ()

    @classmethod
    def of_prompts(
        cls,
        rows: Int32Array,
        tokens: Sequence[Int32Array],
        pages: Sequence[Int32Array],
        *,
        sampling: Sequence[RowSampling] | None = None,
        num_logprobs: Int32Array | None = None,
        prompt_logprobs_from: Int32Array | None = None,
    ) -> "StartedRows":
        """Returns rows that have only a prompt and start at its first position. They are greedy by default."""
        zeros = np.zeros(rows.size, np.int32)
        return cls(
            rows=rows,
            tokens=tokens,
            pages=pages,
            first_position=zeros,
            num_prompt_tokens=np.array([prompt.size for prompt in tokens], np.int32),
            sampling=[GREEDY] * rows.size if sampling is None else sampling,
            sample_idx=zeros,
            banned_until=zeros,
            banned=[zeros[:0]] * rows.size,
            num_logprobs=zeros if num_logprobs is None else num_logprobs,
            prompt_logprobs_from=zeros if prompt_logprobs_from is None else prompt_logprobs_from,
        )


def read_started(message: pb.StartedRows, geometry: Geometry) -> StartedRows:
    """Returns the rows' arrays, checked against `geometry`. Raises PlanError."""
    name = "started."
    num = len(message.rows) // 4
    highest = np.iinfo(np.int32).max
    rows = int32_array(message.rows, name + "rows", 1, geometry.max_rows)
    if not are_distinct(geometry.max_rows, rows):
        raise PlanError("a row occurs twice in started.rows")
    num_tokens = int32_array(message.num_tokens, name + "num_tokens", 1, geometry.max_length, num)
    num_pages = int32_array(message.num_pages, name + "num_pages", 0, geometry.pages_per_row, num)
    num_banned = int32_array(message.num_banned, name + "num_banned", 0, geometry.vocab_size, num)
    tokens = int32_array(message.tokens, name + "tokens", 0, geometry.vocab_size - 1, int(num_tokens.sum()))
    # A page behind the window is 0.
    least_page = 0 if geometry.window else 1
    pages = int32_array(message.pages, name + "pages", least_page, geometry.num_pages - 1, int(num_pages.sum()))
    banned = int32_array(message.banned, name + "banned", 0, geometry.vocab_size - 1, int(num_banned.sum()))
    first_position = int32_array(message.first_position, name + "first_position", 0, geometry.max_length - 1, num)
    if (first_position >= num_tokens).any():
        raise PlanError("started.first_position must lie below started.num_tokens")
    if not pages.all():
        _check_absent(rows, pages, num_pages, first_position, geometry)
    num_prompt = int32_array(message.num_prompt_tokens, name + "num_prompt_tokens", 1, geometry.max_length, num)
    if (num_prompt > num_tokens).any():
        raise PlanError("started.num_prompt_tokens must not exceed started.num_tokens")
    logprobs_from = _read_rare(message, "prompt_logprobs_from", geometry.max_length, num)
    if (logprobs_from >= num_prompt).any():
        raise PlanError("started.prompt_logprobs_from must lie below started.num_prompt_tokens")
    return StartedRows(
        rows=rows,
        tokens=split(tokens, num_tokens),
        pages=split(pages, num_pages),
        first_position=first_position,
        num_prompt_tokens=num_prompt,
        sampling=_read_samplings(message, num, geometry.vocab_size),
        sample_idx=int32_array(message.sample_idx, name + "sample_idx", 0, highest, num),
        banned_until=int32_array(message.banned_until, name + "banned_until", 0, highest, num),
        banned=split(banned, num_banned),
        num_logprobs=_read_rare(message, "num_logprobs", 1 + min(geometry.vocab_size, MAX_TOP_LOGPROBS), num),
        prompt_logprobs_from=logprobs_from,
        constraints=_read_constraints(message.constraints, num),
    )


def _read_constraints(data: bytes, num: int) -> Sequence[bytes]:
    if not data:
        return ()
    if len(data) != num * _HASH_BYTES:
        raise PlanError(
            f"started.constraints has {numbered(len(data), 'byte')}; {numbered(num, 'row', 'need')} {num * _HASH_BYTES}"
        )
    hashes = [data[at : at + _HASH_BYTES] for at in range(0, len(data), _HASH_BYTES)]
    return [b"" if hash_ == _NO_HASH else hash_ for hash_ in hashes]


def _read_samplings(message: pb.StartedRows, num: int, vocab_size: int) -> list[RowSampling]:
    """Parses each row's sampling. Rows with equal bytes, such as samples of one request, share one RowSampling."""
    sizes = int32_array(message.num_sampling_bytes, "started.num_sampling_bytes", 0, MAX_SAMPLING_BYTES, num)
    data, ends = message.sampling, np.cumsum(sizes).tolist()
    if len(data) != sizes.sum():
        raise PlanError(f"started.sampling has {numbered(len(data), 'byte')}; num_sampling_bytes makes {sizes.sum()}")
    by_bytes: dict[bytes, RowSampling] = {}
    samplings: list[RowSampling] = []
    for i, (end, size) in enumerate(zip(ends, sizes.tolist(), strict=True)):
        encoded = data[end - size : end]
        if encoded not in by_bytes:
            by_bytes[encoded] = read_sampling(encoded, f"started.sampling[{i}]", vocab_size)
        samplings.append(by_bytes[encoded])
    return samplings


def _read_rare(message: pb.StartedRows, name: str, high: int, num: int) -> Int32Array:
    """Reads a field that is empty if no row uses it."""
    data = getattr(message, name)
    return int32_array(data, f"started.{name}", 0, high, num) if data else np.zeros(num, np.int32)


def _check_absent(
    rows: Int32Array, pages: Int32Array, num_pages: Int32Array, first_position: Int32Array, geometry: Geometry
) -> None:
    """Checks that each page 0 lies wholly behind the window of the row's next query, and after the sink tokens."""
    of_row = np.repeat(np.arange(rows.size), num_pages)
    col = np.arange(pages.size) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    first_seen = first_position[of_row] - geometry.window + 1
    behind = ((col + 1) * geometry.page_size <= first_seen) & (col * geometry.page_size >= geometry.sink_tokens)
    wrong = np.flatnonzero((pages == 0) & ~behind)
    if wrong.size:
        at = wrong[0]
        raise PlanError(
            f"started.pages holds 0 for page {col[at]} of row {rows[of_row[at]]}, but position "
            f"{first_position[of_row[at]]} sees it: the window is {geometry.window}, sink_tokens {geometry.sink_tokens}"
        )
