"""The settings of one run of the lab: defaults, bounds and help. Knows nothing of layouts."""

from pydantic import BaseModel, ConfigDict, model_validator

from tandem_contract.settings import number

MAX_LENGTH = 1_048_576
MAX_TOTAL_TOKENS = 20_000_000
"""Tokens of all sequences of one run. Each of them is a call into the layout."""
MAX_MEMORY_TOKENS = 16_777_216


class Settings(BaseModel):
    """The default is the lab's own: 100 sequences of 100 to 3,000 tokens. Lengths are tokens, prompt included."""

    model_config = ConfigDict(frozen=True)

    sequences: int = number(100, 1, 100_000, "N", "sequences that want to run at once")
    lives: int = number(3, 1, 10_000, "N", "sequences per client, one after another")
    min_length: int = number(100, 2, MAX_LENGTH, "N", "tokens of the shortest sequence")
    max_length: int = number(3000, 2, MAX_LENGTH, "N", "tokens of the longest sequence")
    prompt_share: float = number(0.5, 0, 1, "SHARE", "share of a sequence that is prompt; the rest is generated")
    gap: float = number(4.0, 0, 1_000_000, "STEPS", "mean gap between the first arrivals")
    reserve: int = number(4096, 2, MAX_LENGTH, "N", "longest sequence served; the contiguous layout reserves it")
    memory_tokens: int = number(65_536, 2, MAX_MEMORY_TOKENS, "N", "memory, in tokens whose K/V it holds")
    page_size: int = number(16, 1, 4096, "N", "tokens per page")
    growth: float = number(1.5, 1, 16, "X", "factor by which the growing layout enlarges a full extent")
    prefix_groups: int = number(4, 0, 100_000, "N", "shared prefixes of prompts; 0: none")
    prefix_length: int = number(512, 0, MAX_LENGTH, "N", "tokens of each prefix")
    samples: int = number(1, 1, 1024, "N", "sequences that share one prompt")
    window: int | None = number(None, 1, MAX_LENGTH, "N", "attention window in tokens; default: full attention")
    seed: int = number(0, 0, 2**63 - 1, "N", "seed of all random draws")

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        if self.min_length > self.max_length:
            raise ValueError(f"--min-length is {self.min_length}; it must be at most --max-length {self.max_length}")
        # One page besides the padding page.
        if self.memory_tokens < 2 * self.page_size:
            raise ValueError(
                f"--memory-tokens is {self.memory_tokens}; it must be at least {2 * self.page_size} (two pages)"
            )
        if self.sequences % self.samples:
            raise ValueError(f"--sequences is {self.sequences}; it must be a multiple of --samples {self.samples}")
        total = self.sequences * self.lives * self.max_length
        if total > MAX_TOTAL_TOKENS:
            raise ValueError(
                f"--sequences × --lives × --max-length is {total:,} tokens; it must be at most {MAX_TOTAL_TOKENS:,}"
            )
        return self

    @property
    def span(self) -> int:
        """The most positions that the cache holds of one sequence: all that are served, or the window."""
        return self.reserve if self.window is None else min(self.reserve, self.window)
