"""The pretend model's sampling: the token that follows a history under a request's settings, and its logprob.

Owns the settings, and pure functions of them and a history's hash. Every setting that differs from its default enters
the draw, so a setting that is lost or mixed up changes the tokens. Bans, biases of minus infinity and allowed tokens
are obeyed exactly. Logprobs are pseudo-values of hash and token alone, because the model's logprobs do not depend on
sampling either; they are exact in f32. Knows nothing of pages, rows, plans or sockets.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import numpy as np
from tandem.v1 import inference_pb2 as pb

from tests.rigs.hashing import MASK, extend, mix, mix_array

_MAX_REDRAWS = 4096
_LOGPROB_SALT, _LOGPROB_STEPS = 0x10960B5, 1 << 20
MINUS_INFINITY = float("-inf")
# Fields of SamplingParams that a plan sets for every row, and those that it sets only if they are not off.
SCALARS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
LATER = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.number > 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A sample's settings; the defaults have no effect. Floats are rounded to the f32 that the wire carries.

    `biases` are (token, bias); minus infinity bans the token. An empty `allowed` allows every token. `later` are those
    of LATER that are set.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    sample_idx: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    biases: tuple[tuple[int, float], ...] = ()
    allowed: frozenset[int] = frozenset()
    later: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, params: pb.SamplingParams, sample_idx: int = 0) -> "Settings":
        """Returns the settings in a complete SamplingParams. A ban wins over a bias."""
        banned = dict.fromkeys(params.banned_token_ids, MINUS_INFINITY)
        return cls(
            **{name: getattr(params, name) for name in SCALARS},
            sample_idx=sample_idx,
            biases=tuple((dict(params.logit_bias) | banned).items()),
            allowed=frozenset(params.allowed_token_ids.ids),
            later=tuple((name, getattr(params, name)) for name in LATER if params.HasField(name)),
        )

    def params(self) -> pb.SamplingParams:
        """Returns what the front end makes of a request with these settings."""
        values = {name: getattr(self, name) for name in SCALARS} | dict(self.later)
        params = pb.SamplingParams(**values, num_samples=1)
        params.logit_bias.update({token: bias for token, bias in self.biases if bias != MINUS_INFINITY})
        params.banned_token_ids.extend(sorted(self.banned()))
        if self.allowed:
            params.allowed_token_ids.ids.extend(sorted(self.allowed))
        return params

    def encoded(self) -> bytes:
        return self.params().SerializeToString(deterministic=True)

    def banned(self) -> frozenset[int]:
        """Returns the tokens that have a bias of minus infinity."""
        return frozenset(token for token, bias in self.biases if bias == MINUS_INFINITY)

    def key(self, num_prompt_tokens: int) -> int:
        """Returns a hash of all settings that shape the draw, or 0 if none does. Greedy ignores noise and filters."""
        words: list[int] = []
        if self.temperature > 0:
            words += [_word(1, _bits(self.temperature)), _word(2, self.seed), _word(3, self.sample_idx)]
            words += [_word(4, _bits(self.top_p)), _word(5, self.top_k), _word(6, _bits(self.min_p))]
            if self.typical_p < 1:
                words.append(_word(14, _bits(self.typical_p)))
            words += [_word(15 + LATER.index(name), _bits(value)) for name, value in self.later]
        if self.presence_penalty or self.frequency_penalty:
            # These penalties count the output alone, so the key depends on where the output begins.
            words += [_word(7, _bits(self.presence_penalty)), _word(8, _bits(self.frequency_penalty))]
            words.append(_word(9, num_prompt_tokens))
        if self.repetition_penalty != 1:
            words.append(_word(10, _bits(self.repetition_penalty)))
        for token, bias in sorted(self.biases):
            words += [_word(11, token), _word(12, _bits(bias))]
        if self.allowed:
            words += [_word(13, token) for token in sorted(self.allowed)]
        key = 0
        for word in words:
            key = extend(key, word)
        return key


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _word(place: int, value: int) -> int:
    return mix(value ^ place << 56)


def draw(prefix: int, key: int, *, vocab: int, allowed: Collection[int], banned: Collection[int]) -> int:
    """Returns the token after a history: one of `allowed`, or of [0, vocab) if that is empty; never a banned one."""
    start = prefix ^ key
    if allowed:
        open_to_it = sorted(set(allowed) - set(banned))
        if not open_to_it:
            raise ValueError(f"all of the {len(allowed)} tokens that are allowed are banned")
        return open_to_it[mix(start) % len(open_to_it)]
    for attempt in range(_MAX_REDRAWS):
        token = mix((start + attempt) & MASK) % vocab
        if token not in banned:
            return token
    raise ValueError(f"no token of {vocab} is allowed: {len(banned)} are banned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The logprob of a token after a history, and of the most probable tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@cache
def _salted(vocab_size: int) -> np.ndarray:
    return mix_array(np.arange(vocab_size, dtype=np.uint64) + np.uint64(_LOGPROB_SALT))


def logprob_of(prefix: int, token: int, *, vocab_size: int, top_k: int) -> Logprob:
    """Returns the logprob of `token` after a history. Among equal logprobs, the smaller id comes first."""
    steps = mix_array(_salted(vocab_size) ^ np.uint64(prefix)) % np.uint64(_LOGPROB_STEPS)
    logprobs = -(steps.astype(np.float32)) / 1024
    best = np.argsort(steps, kind="stable")[:top_k]
    top = tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return Logprob(logprob=float(logprobs[token]), top=top)
