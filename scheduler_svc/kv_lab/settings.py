"""What one run of the lab is asked for. Owns the preset, the bounds and their words; knows nothing of layouts."""

from dataclasses import dataclass

MAX_LENGTH = 1_048_576
MAX_TOTAL_TOKENS = 20_000_000
"""Tokens of all sequences of one run: every one of them is a call into the layout."""
MAX_MEMORY_TOKENS = 16_777_216
MAX_GROWTH = 16


class SettingsError(ValueError):
    """A setting that cannot be: names it, its number and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The preset is the lab's own: 100 sequences of 100 to 3,000 tokens. Lengths are in tokens, prompt included."""

    sequences: int = 100
    """That want to run at once; each place is taken by another sequence when one ends."""
    lives: int = 3
    """Sequences that each place sees, one after another."""
    min_length: int = 100
    max_length: int = 3000
    prompt_share: float = 0.5
    """Of a sequence's length; the rest is generated, one token per step."""
    gap: float = 4.0
    """Mean steps between the first arrivals."""
    reserve: int = 4096
    """The longest sequence that is served: what the contiguous layout reserves for each."""
    memory_tokens: int = 65_536
    page_size: int = 16
    growth: float = 1.5
    """How much larger than it was the growing layout makes an extent that is full."""
    prefix_groups: int = 4
    prefix_length: int = 512
    samples: int = 1
    """Sequences that share one prompt."""
    window: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _within("--sequences", self.sequences, 1, 100_000)
        _within("--lives", self.lives, 1, 10_000)
        _within("--reserve", self.reserve, 2, MAX_LENGTH)
        _within("--max-length", self.max_length, 2, MAX_LENGTH)
        _within("--min-length", self.min_length, 2, self.max_length)
        _within("--prompt-share", self.prompt_share, 0, 1)
        _within("--gap", self.gap, 0, 1_000_000)
        _within("--page-size", self.page_size, 1, 4096)
        # One page beside the padding page.
        _within("--memory-tokens", self.memory_tokens, 2 * self.page_size, MAX_MEMORY_TOKENS)
        _within("--growth", self.growth, 1, MAX_GROWTH)
        _within("--prefix-groups", self.prefix_groups, 0, 100_000)
        _within("--prefix-length", self.prefix_length, 0, MAX_LENGTH)
        _within("--samples", self.samples, 1, 1024)
        _within("--seed", self.seed, 0, 2**63 - 1)
        if self.window is not None:
            _within("--window", self.window, 1, MAX_LENGTH)
        if self.sequences % self.samples:
            raise SettingsError(f"--sequences is {self.sequences}; it must be a multiple of --samples {self.samples}")
        total = self.sequences * self.lives * self.max_length
        if total > MAX_TOTAL_TOKENS:
            raise SettingsError(
                f"--sequences × --lives × --max-length is {total:,} tokens; at most {MAX_TOTAL_TOKENS:,} are simulated"
            )

    @property
    def span(self) -> int:
        """Positions of one sequence that are kept at most: all that are served, or the window."""
        return self.reserve if self.window is None else min(self.reserve, self.window)


def _within(name: str, value: float, least: float, most: float) -> None:
    # So written that a NaN is outside.
    if not least <= value <= most:
        raise SettingsError(f"{name} is {value}; it must be from {least:,} to {most:,}")
