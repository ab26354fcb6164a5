"""The matchers of a mask server: one per constraint, and one per row, by llguidance.

Owns them, and the words of their errors. Knows nothing of sockets or processes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from gpu_worker.constraints.names import NamesOfRow, Places, TokenTexts
from tandem_contract.grammars import may_end

_NEWLINE = "\n"


class MatcherError(Exception):
    """A constraint cannot be used, or cannot go on; the text is one sentence for the caller."""


NO_TOKEN = MatcherError("the constraint allows no token of the model")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint that is ready."""

    matcher: llguidance.LLMatcher
    # Where the output has JSON in which an object might get a name twice; None if nowhere.
    places: Places | None


@dataclass(slots=True)
class FollowedRow:
    """One start of a row."""

    start: int
    constraint: int
    matcher: llguidance.LLMatcher
    # None where no object can have a name twice.
    names: NamesOfRow | None = None
    num_tokens: int = 0


class Matchers:
    """Compiles constraints and follows the output of rows."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, *, eos_token_ids: Sequence[int]) -> None:
        """eos_token_ids: the model's; without one, no mask contains the token that llguidance takes for it."""
        self._tokenizer = tokenizer
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._hidden = () if eos_token_ids else tuple(tokenizer.eos_tokens)
        self._eos = tuple(eos_token_ids)
        self._constraints: dict[int, Compiled] = {}
        # Made for the first constraint that needs them.
        self._texts: TokenTexts | None = None
        self._rows: dict[int, FollowedRow] = {}

    def compiled(self, source: bytes) -> Compiled:
        """A constraint with its first mask computed. May run in another thread. Raises MatcherError."""
        scratch = np.zeros(self._num_words, np.int32)
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, source.decode(), log_level=0)
            _check(matcher)
            self._fill(matcher, scratch.ctypes.data)
            places = Places.of(source)
            if places is not None and self._texts is None:
                self._texts = TokenTexts(self._tokenizer)
        except BaseException as error:  # llguidance's panics are not Exceptions
            raise MatcherError(sentence_of(error)) from None
        if not scratch.any():
            raise NO_TOKEN
        return Compiled(matcher, places)

    def define(self, constraint: int, compiled: Compiled) -> None:
        self._constraints[constraint] = compiled

    def drop(self, constraint: int) -> None:
        self._constraints.pop(constraint, None)
        self._rows = {row: followed for row, followed in self._rows.items() if followed.constraint != constraint}

    def row(self, row: int, start: int, constraint: int) -> FollowedRow:
        """The row as far as it was followed. start: numbers the starts of rows; another one is another sequence.

        Raises MatcherError, and the exceptions of llguidance.
        """
        followed = self._rows.get(row)
        if followed is None or followed.start != start:
            base = self._constraints.get(constraint)
            if base is None:
                raise MatcherError("the constraint is not prepared")
            texts, places = self._texts, base.places
            names = None if texts is None or places is None else NamesOfRow(texts, places)
            followed = self._rows[row] = FollowedRow(start, constraint, base.matcher.deep_copy(), names)
        return followed

    def take(self, followed: FollowedRow, tokens: Sequence[int]) -> None:
        """Lets the row take tokens. Raises MatcherError, and the exceptions of llguidance."""
        matcher = followed.matcher
        if not (matcher.consume_token(tokens[0]) if len(tokens) == 1 else matcher.consume_tokens(list(tokens))):
            _check(matcher)
            raise MatcherError("the constraint does not allow a token of the output")
        followed.num_tokens += len(tokens)
        if followed.names is not None:
            followed.names.take(tokens)

    def is_complete(self, followed: FollowedRow) -> bool:
        """Whether nothing can follow. Raises MatcherError."""
        if not followed.matcher.is_stopped():
            return False
        _check(followed.matcher)
        return True

    def fill(self, followed: FollowedRow, address: int) -> None:
        """Writes the mask of the row's next token, int32 [words]. Raises MatcherError, and what llguidance raises."""
        if self._hidden and followed.matcher.is_stopped():
            ctypes.memset(address, 0xFF, 4 * self._num_words)
            return
        self._fill(followed.matcher, address)
        if followed.names is not None:
            words = (ctypes.c_uint32 * self._num_words).from_address(address)
            followed.names.forbid(followed.matcher, np.ctypeslib.as_array(words))

    def _fill(self, matcher: llguidance.LLMatcher, address: int) -> None:
        matcher.unsafe_compute_mask_ptr(address, 4 * self._num_words)
        if matcher.is_error():
            _check(matcher)
        for token in self._hidden:
            _word_of(token, address).value &= ~(1 << (token & 31))
        for token in self._eos:
            word = _word_of(token, address)
            if word.value >> (token & 31) & 1 and not may_end(matcher, token):
                word.value &= ~(1 << (token & 31))


def _word_of(token: int, address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address + 4 * (token >> 5))


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise MatcherError(_sentence(matcher.get_error()))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise MatcherError(f"the constraint stopped: {matcher.stop_reason()}")


def sentence_of(error: BaseException) -> str:
    """What a row or a constraint failed of, in one line."""
    return str(error) if isinstance(error, MatcherError) else _sentence(f"{type(error).__name__}: {error}")


def _sentence(text: str) -> str:
    """The first line of llguidance's message; the others show the state of its parser."""
    return f"llguidance: {text.strip().partition(_NEWLINE)[0]}"
