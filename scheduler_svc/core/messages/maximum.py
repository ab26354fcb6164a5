"""The most output tokens of one sample, and what is counted for it before they come."""

from dataclasses import dataclass

EXPECTED_TOKENS = 256
"""The tokens that are still expected of a sample without a maximum: most answers are shorter, and the rest of a
context of 131,072 tokens would leave pages idle and let one request take the tokens of a tenant's minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maximum:
    """The front end decides it. The number counts also if the caller did not set it, but not as a demand: a worker
    with less room takes the request, which ends where the room of every worker ends."""

    tokens: int
    is_set: bool = True
    """Whether the caller set it."""

    def expected(self, most: int) -> int:
        """Returns how many tokens are expected where at most `most` can come."""
        return most if self.is_set else min(most, EXPECTED_TOKENS)
