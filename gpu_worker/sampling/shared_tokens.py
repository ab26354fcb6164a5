"""How the ranks of a worker group agree on the tokens of a step.

Every rank computes all logits and draws with the same noise. Logits may still differ in the last bit, and a token then,
so the leader's tokens replace the others' before anything that the next step reads is written.
"""

from collections.abc import Callable

from torch import Tensor

# Overwrites tokens int64 [n] in place, in the stream of the step.
ShareTokens = Callable[[Tensor], None]


def keep_tokens(tokens: Tensor) -> None:
    """For a worker of one process."""
