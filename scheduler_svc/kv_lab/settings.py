"""The settings of one run of the lab: defaults, bounds and help. Knows nothing of layouts."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LENGTH = 1_048_576
MAX_TOTAL_TOKENS = 20_000_000
"""Tokens of all sequences of one run. Each of them is a call into the layout."""
MAX_MEMORY_TOKENS = 16_777_216


class Settings(BaseModel):
    """The default is the lab's own: 100 sequences of 100 to 3,000 tokens. Lengths are tokens, prompt included."""

    model_config = ConfigDict(frozen=True)

    sequences: int = Field(100, ge=1, le=100_000, title="N", description="sequences that want to run at once")
    lives: int = Field(3, ge=1, le=10_000, title="N", description="sequences per client, one after another")
    min_length: int = Field(100, ge=2, le=MAX_LENGTH, title="N", description="tokens of the shortest sequence")
    max_length: int = Field(3000, ge=2, le=MAX_LENGTH, title="N", description="tokens of the longest sequence")
    prompt_share: float = Field(
        0.5, ge=0, le=1, title="SHARE", description="share of a sequence that is prompt; the rest is generated"
    )
    gap: float = Field(4.0, ge=0, le=1_000_000, title="STEPS", description="mean gap between the first arrivals")
    reserve: int = Field(
        4096, ge=2, le=MAX_LENGTH, title="N", description="longest sequence served; the contiguous layout reserves it"
    )
    memory_tokens: int = Field(
        65_536, ge=2, le=MAX_MEMORY_TOKENS, title="N", description="memory, in tokens whose K/V it holds"
    )
    page_size: int = Field(16, ge=1, le=4096, title="N", description="tokens per page")
    growth: float = Field(
        1.5, ge=1, le=16, title="X", description="factor by which the growing layout enlarges a full extent"
    )
    prefix_groups: int = Field(4, ge=0, le=100_000, title="N", description="shared prefixes of prompts; 0: none")
    prefix_length: int = Field(512, ge=0, le=MAX_LENGTH, title="N", description="tokens of each prefix")
    samples: int = Field(1, ge=1, le=1024, title="N", description="sequences that share one prompt")
    window: int | None = Field(
        None, ge=1, le=MAX_LENGTH, title="N", description="attention window in tokens; default: full attention"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, title="N", description="seed of all random draws")

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        if self.min_length > self.max_length:
            raise ValueError(f"--min-length is {self.min_length}; it must be at most --max-length {self.max_length}")
        # One page besides the padding page.
        if self.memory_tokens < 2 * self.page_size:
            raise ValueError(f"--memory-tokens is {self.memory_tokens}; it must be at least two pages")
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
