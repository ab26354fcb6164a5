"""The matchers of a mask server: one per constraint, and one per row, by llguidance.

Owns them, and the words of their errors. Knows nothing of sockets or processes. No method raises because of a
constraint: llguidance's errors and panics become a `MatcherError`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

# Output tokens that are taken at once; the server's progress changes after each piece.
_PIECE = 64
_NEWLINE = "\n"


class MatcherError(Exception):
    """A constraint cannot be used, or cannot go on; the text is one sentence for the caller."""


@dataclass(slots=True)
class _Row:
    start: int
    constraint: int
    matcher: llguidance.LLMatcher
    num_tokens: int = 0


class Matchers:
    """Compiles constraints and follows the output of rows."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, *, eos_token_ids: Sequence[int]) -> None:
        """eos_token_ids: the model's; without one, no mask contains the token that llguidance takes for it."""
        self._tokenizer = tokenizer
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._hidden = () if eos_token_ids else tuple(tokenizer.eos_tokens)
        self._constraints: dict[int, llguidance.LLMatcher] = {}
        self._rows: dict[int, _Row] = {}

    def compiled(self, source: bytes) -> llguidance.LLMatcher:
        """A matcher that has computed its first mask. May run in another thread. Raises MatcherError."""
        with _errors():
            matcher = llguidance.LLMatcher(self._tokenizer, source.decode(), log_level=0)
            _check(matcher)
            scratch = np.zeros(self._num_words, np.int32)
            self._fill(matcher, scratch)
        return matcher

    def define(self, constraint: int, matcher: llguidance.LLMatcher) -> None:
        """Keeps a compiled constraint under its id."""
        self._constraints[constraint] = matcher

    def drop(self, constraint: int) -> None:
        """Forgets a constraint, and the rows that had it."""
        self._constraints.pop(constraint, None)
        self._rows = {row: own for row, own in self._rows.items() if own.constraint != constraint}

    def take(
        self, row: int, start: int, constraint: int, tokens: NDArray[np.int32], on_piece: Callable[[int], None]
    ) -> bool:
        """Lets the row take the output tokens that it has not taken. Returns whether nothing can follow.

        start: numbers the starts of rows; another one than before is another sequence. tokens: all output tokens.
        on_piece: called with the number of tokens taken before each piece. Raises MatcherError.
        """
        own = self._rows.get(row)
        with _errors():
            if own is None or own.start != start:
                if (base := self._constraints.get(constraint)) is None:
                    raise MatcherError("the constraint is not prepared")
                own = self._rows[row] = _Row(start, constraint, base.deep_copy())
            while own.num_tokens < tokens.size:
                on_piece(own.num_tokens)
                piece = tokens[own.num_tokens : own.num_tokens + _PIECE].tolist()
                if not own.matcher.consume_tokens(piece):
                    _check(own.matcher)
                    raise MatcherError("the constraint does not allow a token of the output")
                own.num_tokens += len(piece)
            _check(own.matcher)
            return own.matcher.is_stopped()

    def fill(self, row: int, mask: NDArray[np.int32]) -> None:
        """Writes the mask of the row's next token, int32 [words]. Raises MatcherError."""
        matcher = self._rows[row].matcher
        with _errors():
            if self._hidden and matcher.is_stopped():
                mask[:] = -1
                return
            self._fill(matcher, mask)

    def _fill(self, matcher: llguidance.LLMatcher, mask: NDArray[np.int32]) -> None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(matcher)
        words = mask.view(np.uint32)
        for token in self._hidden:
            words[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not mask.any():
            raise MatcherError("the constraint allows no token of the model")


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise MatcherError(_sentence(matcher.get_error()))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise MatcherError(f"the constraint stopped: {matcher.stop_reason()}")


@contextmanager
def _errors() -> Iterator[None]:
    """Turns whatever llguidance raises into a MatcherError; its panics are no Exceptions."""
    try:
        yield
    except (MatcherError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise MatcherError(_sentence(f"{type(error).__name__}: {error}")) from None


def _sentence(text: str) -> str:
    """The first line of llguidance's message; the others show the state of its parser."""
    return f"llguidance: {text.strip().partition(_NEWLINE)[0]}"
