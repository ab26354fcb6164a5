"""The settings of a comparison of layouts, and the sequences that it runs. Knows nothing of layouts.

The sequences depend on the settings alone, so every layout gets the same ones.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.simulator.cost.hardware import MODELS
from tandem_contract.settings import number, one_of

_VOCABULARY = 32_000
_MAX_LENGTH = 1_048_576
# Of all sequences of one run. Each of them is a call into the layout.
_MAX_TOTAL_TOKENS = 20_000_000


class Settings(BaseModel):
    """The default is 100 clients that send three sequences each. Lengths are tokens, prompt included."""

    model_config = ConfigDict(frozen=True)

    sequences: int = number(100, 1, 100_000, "N", "sequences that want to run at once")
    lives: int = number(3, 1, 10_000, "N", "sequences per client, one after another")
    min_length: int = number(100, 2, _MAX_LENGTH, "N", "tokens of the shortest sequence")
    max_length: int = number(3000, 2, _MAX_LENGTH, "N", "tokens of the longest sequence")
    prompt_share: float = number(0.5, 0, 1, "SHARE", "share of a sequence that is prompt; the rest is generated")
    gap: float = number(4.0, 0, 1_000_000, "STEPS", "mean gap between the first arrivals")
    reserve: int = number(4096, 2, _MAX_LENGTH, "N", "longest sequence served; the contiguous layout reserves it")
    memory_tokens: int = number(65_536, 2, 16_777_216, "N", "memory, in tokens whose K/V it holds")
    page_size: int = number(16, 1, 4096, "N", "tokens per page")
    growth: float = number(1.5, 1, 16, "X", "factor by which the growing layout enlarges a full extent")
    prefix_groups: int = number(4, 0, 100_000, "N", "shared prefixes of prompts; 0: none")
    prefix_length: int = number(512, 0, _MAX_LENGTH, "N", "tokens of each prefix")
    seed: int = number(0, 0, 2**63 - 1, "N", "seed of all random draws")
    model: Annotated[str, one_of(MODELS)] = Field("llama-3.1-8b", title="NAME", description=", ".join(MODELS))
    element_bytes: int = number(2, 1, 16, "N", "bytes per number of the K/V")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V, in all layers."""
        return MODELS[self.model].kv_values * self.element_bytes

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        if self.min_length > self.max_length:
            raise ValueError(f"--min-length is {self.min_length}; it must be at most --max-length {self.max_length}")
        # One page besides the padding page.
        if self.memory_tokens < 2 * self.page_size:
            raise ValueError(
                f"--memory-tokens is {self.memory_tokens}; it must be at least {2 * self.page_size} (two pages)"
            )
        total = self.sequences * self.lives * self.max_length
        if total > _MAX_TOTAL_TOKENS:
            raise ValueError(
                f"--sequences × --lives × --max-length is {total:,} tokens; it must be at most {_MAX_TOTAL_TOKENS:,}"
            )
        return self


@dataclass(frozen=True, slots=True)
class Sequence:
    """`tokens` int32[length] holds the `prompt` tokens and those that are generated after them."""

    index: int
    prompt: int
    tokens: Int32Array

    @property
    def length(self) -> int:
        """Tokens at the sequence's end."""
        return len(self.tokens)


def draw(settings: Settings) -> tuple[list[list[Sequence]], list[int]]:
    """Returns the sequences of each client, one after another, and the steps at which the clients send their first."""
    rng, count = np.random.default_rng(settings.seed), settings.sequences
    prefixes = rng.integers(0, _VOCABULARY, (settings.prefix_groups, settings.prefix_length), np.int32)
    gaps = rng.exponential(settings.gap, count) if settings.gap else np.zeros(count)
    # The first client starts at step 0.
    arrivals = [int(step) for step in np.cumsum(gaps) - gaps[0]]
    clients: list[list[Sequence]] = [[] for _ in range(count)]
    # Round by round, so that more rounds add sequences and leave the first ones as they were.
    for index in range(settings.lives * count):
        prefix = prefixes[int(rng.integers(settings.prefix_groups))] if settings.prefix_groups else prefixes.ravel()
        length = int(rng.integers(settings.min_length, settings.max_length, endpoint=True))
        # At least one token is prompt and one is generated.
        prompt = min(max(1, round(length * settings.prompt_share)), length - 1)
        tokens = np.concatenate([rng.integers(0, _VOCABULARY, n, np.int32) for n in (prompt, length - prompt)])
        shared = min(len(prefix), prompt)
        tokens[:shared] = prefix[:shared]
        clients[index % count].append(Sequence(index, prompt, tokens))
    return clients, arrivals
