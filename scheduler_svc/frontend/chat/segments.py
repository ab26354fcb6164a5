"""Owns the division of an answer's text into regions, by the marks of a response template. Pure.

The rules are those of Transformers' ResponseParser: the same template gives the same regions. This one tells more: it
says which text every mark had, so that a region that is no call after all can be shown as it was; it keeps no text that
is divided already; and it holds text back only while that may still be a mark.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

# Text behind the position of the search that a mark's look-behind may see.
MAX_LOOK_BEHIND = 64


class Kind(Enum):
    """What happens in a region."""

    OPEN = "open"
    TEXT = "text"
    CLOSE = "close"


class Event(NamedTuple):
    """`text` is the mark of a region that opens or closes, empty for one without a mark."""

    kind: Kind
    field: str
    text: str


class Segmenter:
    """Divides one answer. `spec` is Transformers' ResponseTemplate; fields in `ignored` are ordinary text."""

    __slots__ = ("_buffer", "_current", "_implicit", "_is_open", "_pos", "_spec", "_watched")

    def __init__(self, spec: Any, ignored: frozenset[str] = frozenset()) -> None:
        self._spec = spec
        self._watched = [field for field in spec.fields.values() if field.name not in ignored and field.open_re]
        # The region of text outside the others. Without one that text is dropped.
        self._implicit: str | None = spec.implicit
        self._current = self._implicit
        self._is_open = False
        self._buffer = ""
        self._pos = 0

    @property
    def current(self) -> str | None:
        """The field of the region that new text belongs to."""
        return self._current

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may begin a mark."""
        return len(self._buffer) - self._pos

    def feed(self, text: str) -> Iterator[Event]:
        """The events that `text` causes."""
        self._buffer += text
        yield from self._advance(is_end=False)
        keep = max(0, self._pos - MAX_LOOK_BEHIND)
        self._buffer, self._pos = self._buffer[keep:], self._pos - keep

    def finish(self) -> Iterator[Event]:
        """The events at the end of the answer. An open region is closed without a mark."""
        yield from self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> Iterator[Event]:
        while True:
            mark, hold_from = self._find(is_end=is_end)
            if mark is None:
                end = len(self._buffer) if is_end else hold_from
                yield from self._text(end)
                if is_end:
                    yield from self._close("")
                return
            kind, field, match = mark
            yield from self._text(match.start())
            was_open = self._is_open
            self._pos = match.end()
            if kind is Kind.OPEN:
                yield from self._close("")
                self._current, self._is_open = field.name, True
                yield Event(Kind.OPEN, field.name, match.group())
            else:
                yield from self._close(match.group())
                if not was_open and match.start() == match.end():
                    return

    def _find(self, *, is_end: bool) -> tuple[tuple[Kind, Any, Any] | None, int]:
        """Returns (the first mark that is certain, where text begins that may still become one)."""
        best: tuple[Kind, Any, Any] | None = None
        best_key: tuple[int, int, bool, str] | None = None
        hold_from = len(self._buffer)
        for kind, field in self._expected():
            pattern = field.open_re if kind is Kind.OPEN else field.close_re
            match = pattern.search(self._buffer, self._pos, partial=not is_end)
            if match is None:
                continue
            if not is_end and (match.partial or self._may_grow(kind, field, match)):
                hold_from = min(hold_from, match.start())
                continue
            key = (match.start(), match.start() - match.end(), kind is Kind.CLOSE, field.name)
            if best_key is None or key < best_key:
                best_key, best = key, (kind, field, match)
        if best is not None and best[2].start() >= hold_from:
            best = None
        return best, max(hold_from, self._pos)

    def _expected(self) -> list[tuple[Kind, Any]]:
        current = None if self._current is None else self._spec.fields[self._current]
        closes = [(Kind.CLOSE, current)] if current is not None and current.close_re is not None else []
        if self._current != self._implicit:
            return closes
        return [(Kind.OPEN, field) for field in self._watched] + closes

    def _may_grow(self, kind: Kind, field: Any, match: Any) -> bool:
        """Whether a whole mark at the end of the text may become another one with more text."""
        if match.end() != len(self._buffer):
            return False
        if match.start() == match.end():
            return True
        if kind is Kind.OPEN:
            return field.open_literals is None or field.open_literal_can_extend
        return field.close_literals is None or field.close_literal_can_extend

    def _text(self, end: int) -> Iterator[Event]:
        text = self._buffer[self._pos : end]
        self._pos = max(self._pos, end)
        if text and self._current is not None:
            self._is_open = True
            yield Event(Kind.TEXT, self._current, text)

    def _close(self, mark: str) -> Iterator[Event]:
        field, was_open = self._current, self._is_open
        self._current, self._is_open = self._implicit, False
        if field is not None and was_open:
            yield Event(Kind.CLOSE, field, mark)
