"""Rows in full, as a plan starts them: tokens, pages, sampling, and what few rows ask for beyond that.

Owns the checks of worker.proto's StartedRows that need no row state. Knows nothing of torch or of rows' state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.wire.fields import Float32Array, Int32Array, PlanError, float32_array, int32_array, split, uint64_array

# A penalty or a bias beyond this says nothing that this does not.
_MAX_EDIT = 1e6
_MIN_REPETITION_PENALTY = 1e-6
# Beside the sampled token's.
MAX_TOP_LOGPROBS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedFeatures:
    """What few rows ask for, one entry per started row; off where a row does not."""

    presence_penalty: Float32Array
    frequency_penalty: Float32Array
    repetition_penalty: Float32Array
    biased: Sequence[Int32Array]
    biases: Sequence[Float32Array]
    # An empty one allows every token.
    allowed: Sequence[Int32Array]
    # 0: none; else 1 + k.
    num_logprobs: Int32Array
    # 0: none; else the first position whose token's logprob is wanted.
    prompt_logprobs_from: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRows:
    """Rows in full; one entry per row, ragged arrays cut by their counts."""

    rows: Int32Array
    tokens: Sequence[Int32Array]
    pages: Sequence[Int32Array]
    first_position: Int32Array
    num_prompt_tokens: Int32Array
    temperature: Float32Array
    top_p: Float32Array
    top_k: Int32Array
    min_p: Float32Array
    seed: NDArray[np.uint64]
    sample_idx: Int32Array
    banned_until: Int32Array
    banned: Sequence[Int32Array]
    # None: no row of the plan asks for any.
    features: StartedFeatures | None = None

    @classmethod
    def of_prompts(
        cls,
        rows: Int32Array,
        tokens: Sequence[Int32Array],
        pages: Sequence[Int32Array],
        *,
        temperature: Float32Array,
        top_p: float = 1.0,
        min_p: float = 0.0,
        features: StartedFeatures | None = None,
    ) -> "StartedRows":
        """Rows that hold their prompt alone and start at its first position, with seed 0 and no banned tokens."""
        zeros = np.zeros(rows.size, np.int32)
        return cls(
            rows=rows,
            tokens=tokens,
            pages=pages,
            first_position=zeros,
            num_prompt_tokens=np.array([prompt.size for prompt in tokens], np.int32),
            temperature=temperature,
            top_p=np.full(rows.size, top_p, np.float32),
            top_k=zeros,
            min_p=np.full(rows.size, min_p, np.float32),
            seed=zeros.astype(np.uint64),
            sample_idx=zeros,
            banned_until=zeros,
            banned=[zeros[:0]] * rows.size,
            features=features,
        )


def read_started(message: pb.StartedRows, geometry: Geometry) -> StartedRows:
    """The rows' arrays, checked against `geometry`. Raises PlanError."""
    name = "started."
    num = len(message.rows) // 4
    highest = np.iinfo(np.int32).max
    rows = int32_array(message.rows, name + "rows", 1, geometry.max_rows)
    if np.unique(rows).size != rows.size:
        raise PlanError("a row stands twice in started.rows")
    num_tokens = int32_array(message.num_tokens, name + "num_tokens", 1, geometry.max_length, num)
    num_pages = int32_array(message.num_pages, name + "num_pages", 0, geometry.pages_per_row, num)
    num_banned = int32_array(message.num_banned, name + "num_banned", 0, geometry.vocab_size, num)
    tokens = int32_array(message.tokens, name + "tokens", 0, geometry.vocab_size - 1, int(num_tokens.sum()))
    # 0 stands for a page behind the window.
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
    return StartedRows(
        rows=rows,
        tokens=split(tokens, num_tokens),
        pages=split(pages, num_pages),
        first_position=first_position,
        num_prompt_tokens=num_prompt,
        temperature=float32_array(message.temperature, name + "temperature", 0.0, 1e6, num),
        top_p=float32_array(message.top_p, name + "top_p", 0.0, 1.0, num),
        top_k=int32_array(message.top_k, name + "top_k", 0, highest, num),
        min_p=float32_array(message.min_p, name + "min_p", 0.0, 1.0, num),
        seed=uint64_array(message.seed, name + "seed", num),
        sample_idx=int32_array(message.sample_idx, name + "sample_idx", 0, highest, num),
        banned_until=int32_array(message.banned_until, name + "banned_until", 0, highest, num),
        banned=split(banned, num_banned),
        features=_read_features(message, geometry, num_prompt),
    )


def _check_absent(
    rows: Int32Array, pages: Int32Array, num_pages: Int32Array, first_position: Int32Array, geometry: Geometry
) -> None:
    """Pages that are 0 lie wholly before what the row's next query sees, and after the first tokens that all see."""
    of_row = np.repeat(np.arange(rows.size), num_pages)
    col = np.arange(pages.size) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    first_seen = first_position[of_row] - geometry.window + 1
    behind = ((col + 1) * geometry.page_size <= first_seen) & (col * geometry.page_size >= geometry.sink_tokens)
    wrong = np.flatnonzero((pages == 0) & ~behind)
    if wrong.size:
        at = wrong[0]
        raise PlanError(
            f"started.pages holds 0 for page {col[at]} of row {rows[of_row[at]]}, which its position "
            f"{first_position[of_row[at]]} sees: the window is {geometry.window}, sink_tokens {geometry.sink_tokens}"
        )


def _read_features(message: pb.StartedRows, geometry: Geometry, num_prompt: Int32Array) -> StartedFeatures | None:
    num, last_token = num_prompt.size, geometry.vocab_size - 1
    # Empty where no row asks.
    data = {
        name: getattr(message, name)
        for name in (
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("num_biased", "biased", "biases", "num_allowed", "allowed", "num_logprobs", "prompt_logprobs_from"),
        )
    }
    if not any(data.values()):
        return None

    def floats(name: str, low: float, default: float) -> Float32Array:
        if not data[name]:
            return np.full(num, default, np.float32)
        return float32_array(data[name], f"started.{name}", low, _MAX_EDIT, num)

    def ints(name: str, high: int) -> Int32Array:
        return int32_array(data[name], f"started.{name}", 0, high, num) if data[name] else np.zeros(num, np.int32)

    num_biased, num_allowed = ints("num_biased", geometry.vocab_size), ints("num_allowed", geometry.vocab_size)
    total_biased, total_allowed = int(num_biased.sum()), int(num_allowed.sum())
    biased = int32_array(data["biased"], "started.biased", 0, last_token, total_biased)
    biases = float32_array(data["biases"], "started.biases", -_MAX_EDIT, _MAX_EDIT, total_biased, also=-np.inf)
    allowed = int32_array(data["allowed"], "started.allowed", 0, last_token, total_allowed)
    prompt_from = ints("prompt_logprobs_from", geometry.max_length)
    if (prompt_from >= num_prompt).any():
        raise PlanError("started.prompt_logprobs_from must lie below started.num_prompt_tokens")
    return StartedFeatures(
        presence_penalty=floats("presence_penalty", -_MAX_EDIT, 0.0),
        frequency_penalty=floats("frequency_penalty", -_MAX_EDIT, 0.0),
        repetition_penalty=floats("repetition_penalty", _MIN_REPETITION_PENALTY, 1.0),
        biased=split(biased, num_biased),
        biases=split(biases, num_biased),
        allowed=split(allowed, num_allowed),
        num_logprobs=ints("num_logprobs", 1 + min(geometry.vocab_size, MAX_TOP_LOGPROBS)),
        prompt_logprobs_from=prompt_from,
    )
