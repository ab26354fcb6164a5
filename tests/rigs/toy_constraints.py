"""The toy matcher: which tokens a constraint allows, as a pure function of its bytes and of the output so far.

It reads no grammar. Words in the source set it, in any place: `toy_complete=N` (complete after N tokens), `toy_fail=N`
(no mask for token N), `toy_refuse` (cannot be prepared), `toy_prepare_ms=N` (takes so long to prepare). Without them
all follows from the bytes' hash. Executor and oracle share this module. Knows nothing of rows, plans or sockets.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256

from tests.rigs.hashing import ROOT, extend, mix

_MOST_TOKENS = 24
# About every third token is allowed.
_SHARE = 3
# From every fourth state on the output may end.
_ENDS = 4
REFUSAL = "the toy matcher was told to refuse it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConstraint:
    """A constraint; `Matcher` has the state of one output."""

    salt: int
    complete_after: int
    fails_at: int | None
    prepare_seconds: float
    is_refused: bool

    @classmethod
    def of(cls, source: bytes) -> "ToyConstraint":
        salt = int.from_bytes(sha256(source).digest()[:8], "little")
        return cls(
            salt=salt,
            complete_after=_number(source, "toy_complete") or 1 + salt % _MOST_TOKENS,
            fails_at=_number(source, "toy_fail"),
            prepare_seconds=(_number(source, "toy_prepare_ms") or 0) / 1000,
            is_refused=b"toy_refuse" in source,
        )


def _number(source: bytes, word: str) -> int | None:
    found = re.search(rf"{word}=(\d+)".encode(), source)
    return int(found[1]) if found else None


def late(num_output: int) -> str:
    """The detail of a failure at this token, counted from 1."""
    return f"the constraint took longer than 250 ms at output token {num_output}"


class Matcher:
    """A constraint and the output that it has met so far."""

    def __init__(self, constraint: ToyConstraint, output: Iterable[int] = ()) -> None:
        self._constraint = constraint
        self._state, self.num_tokens = ROOT ^ constraint.salt, 0
        for token in output:
            self.take(token)

    def take(self, token: int) -> None:
        """Appends a token of the output, whether it was allowed or not."""
        self._state = extend(self._state, token)
        self.num_tokens += 1

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self.num_tokens >= self._constraint.complete_after

    @property
    def fails(self) -> bool:
        """Whether the next token has no mask."""
        return self.num_tokens + 1 == self._constraint.fails_at

    def allowed(self, vocab: int, eos: Collection[int]) -> frozenset[int]:
        """The tokens that may come next, at least one: of [0, vocab), EOS only where the output may end."""
        may_end = self.is_complete or mix(self._state) % _ENDS == 0
        if self.is_complete and eos:
            return frozenset(eos)
        ends = frozenset(eos) if may_end else frozenset[int]()
        others = [token for token in range(vocab) if token not in eos]
        some = {token for token in others if mix(self._state ^ mix(token)) % _SHARE == 0}
        # Without another token, one at random.
        return frozenset(some or {others[mix(self._state) % len(others)]}) | ends
