"""Owns the division of an answer's text into regions, by the marks of a response template. Pure.

The rules are those of Transformers' ResponseParser: the same template gives the same regions. This one knows more. An
end mark inside what a region encloses is text (`bodies`), if the rest of the region agrees; until then it is in doubt,
and the text from there on is held. It says which text every mark had, so that a region that turns out to be text
can be shown as it was; it keeps no text that is divided already; and it holds text back while that may still be a mark.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from scheduler_svc.frontend.chat.bodies import Reader, reader_of

# Text behind the position of the search that a mark's look-behind may see.
MAX_LOOK_BEHIND = 64
# The field of text outside of all regions, where the template has none for it.
OUTSIDE = ""


class Kind(Enum):
    OPEN = "open"
    TEXT = "text"
    CLOSE = "close"
    # A region that the end of the answer cuts off: what it encloses may go on.
    CUT = "cut"


class Event(NamedTuple):
    """`text` is the mark of a region that opens or closes, empty for one without a mark."""

    kind: Kind
    field: str
    text: str


class _Mark(NamedTuple):
    """A mark and its place in the text that is kept."""

    kind: Kind
    field: Any
    start: int
    end: int


class Segmenter:
    """Divides one answer. `spec` is Transformers' ResponseTemplate; fields in `ignored` are ordinary text.

    The fields in `hidden` are calls and the marks around them, which callers do not see as the model writes them.
    """

    def __init__(self, spec: Any, ignored: frozenset[str] = frozenset(), hidden: frozenset[str] = frozenset()) -> None:
        self._spec = spec
        self._watched = [field for field in spec.fields.values() if field.name not in ignored and field.open_re]
        # The region of text outside the others. Without one that text has no field.
        self._implicit: str | None = spec.implicit
        # The field of the region that new text belongs to.
        self.current = self._implicit
        self._is_open = False
        self._buffer = ""
        self._pos = 0
        self._hidden = hidden
        # The region's state: what it encloses, and up to where that is read.
        self._reader: Reader | None = None
        self._read_to = 0
        # An end mark that may be text, and how many signs had been read before it.
        self._doubt: _Mark | None = None
        self._doubt_signs = 0

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
        self._read_to -= keep
        if (doubt := self._doubt) is not None:
            self._doubt = doubt._replace(start=doubt.start - keep, end=doubt.end - keep)

    def finish(self, *, is_cut: bool = False) -> Iterator[Event]:
        """The events at the end of the answer. An open region is closed without a mark.

        `is_cut`: the model had not ended its answer. Then the beginning of a mark of a call is dropped.
        """
        if not is_cut:
            yield from self._advance(is_end=True)
            return
        yield from self._advance(is_end=False)
        while self.current != self._implicit:
            # A whole mark that more text would have made longer.
            mark, _ = self._find(is_end=True)
            if mark is None or mark is self._doubt:
                break
            yield from self._text(mark.start)
            self._pos = mark.end
            yield from self._close(self._buffer[mark.start : mark.end])
            yield from self._advance(is_end=False)
        # What is held is left.
        reader, held = self._reader, self._buffer[self._pos :]
        if self.current != self._implicit:
            is_text = reader is None or self._doubt is not None or reader.takes(held[:1])
            yield from self._text(len(self._buffer) if is_text else self._pos)
        elif (begun := self._begun()) is not None:
            yield from self._text(begun.start)
            yield from self._open(begun)
        elif self._implicit is not None:
            yield from self._text(len(self._buffer))
        is_hidden = self.current in self._hidden and not (reader is not None and reader.is_broken)
        yield from self._close("", Kind.CUT if is_hidden else Kind.CLOSE)

    def _begun(self) -> _Mark | None:
        """The mark of a hidden field that the held text begins."""
        marks = list[_Mark]()
        for field in self._watched:
            match = field.open_re.search(self._buffer, self._pos, partial=True) if field.name in self._hidden else None
            if match is not None and match.start() < match.end():
                marks.append(_Mark(Kind.OPEN, field, match.start(), match.end()))
        return min(marks, key=lambda mark: mark.start, default=None)

    def _advance(self, *, is_end: bool) -> Iterator[Event]:
        while True:
            mark, hold_from = self._find(is_end=is_end)
            if mark is None:
                end = len(self._buffer) if is_end else hold_from
                yield from self._text(end)
                if is_end:
                    yield from self._close("")
                return
            yield from self._text(mark.start)
            was_open = self._is_open
            if mark.kind is Kind.OPEN:
                yield from self._open(mark)
            else:
                self._pos = mark.end
                yield from self._close(self._buffer[mark.start : mark.end])
                if not was_open and mark.start == mark.end:
                    return

    def _open(self, mark: _Mark) -> Iterator[Event]:
        self._pos = mark.end
        yield from self._close("")
        self.current, self._is_open = mark.field.name, True
        self._reader, self._doubt = reader_of(mark.field), None
        self._read_to = mark.end
        yield Event(Kind.OPEN, mark.field.name, self._buffer[mark.start : mark.end])

    def _find(self, *, is_end: bool) -> tuple[_Mark | None, int]:
        """Returns (the first mark that is certain, where text begins that may still become one)."""
        if self._reader is not None:
            return self._find_close(self._reader, self._spec.fields[self.current], is_end=is_end)
        best: tuple[tuple[int, int, bool, str], _Mark] | None = None
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
            if best is None or key < best[0]:
                best = key, _Mark(kind, field, match.start(), match.end())
        return best[1] if best is not None and best[1].start < hold_from else None, max(hold_from, self._pos)

    def _find_close(self, reader: Reader, field: Any, *, is_end: bool) -> tuple[_Mark | None, int]:
        """As `_find`, for the end of a region that is read."""
        buffer, match = self._buffer, None
        begin = max(self._read_to, self._pos)
        while True:
            if field.close_re is not None:
                match = field.close_re.search(buffer, begin, partial=not is_end)
            at = len(buffer) if match is None else match.start()
            reader.feed(buffer[self._read_to : at])
            self._read_to = at
            if self._doubt is not None and reader.num_signs > self._doubt_signs:
                self._doubt = None
            if self._doubt is not None and (reader.is_broken or (match is None and is_end)):
                return self._doubt, at
            is_certain = match is not None and (
                is_end or not (match.partial or self._may_grow(Kind.CLOSE, field, match))
            )
            if match is None or not is_certain:
                return None, at if self._doubt is None else self._doubt.start
            mark = _Mark(Kind.CLOSE, field, at, match.end())
            if not reader.takes(buffer[at : at + 1]):
                return mark, at
            if self._doubt is None:
                self._doubt, self._doubt_signs = mark, reader.num_signs
            begin = at + 1

    def _expected(self) -> list[tuple[Kind, Any]]:
        current = None if self.current is None else self._spec.fields[self.current]
        closes = [(Kind.CLOSE, current)] if current is not None and current.close_re is not None else []
        if self.current != self._implicit:
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
        if text:
            self._is_open = self.current is not None
            yield Event(Kind.TEXT, self.current or OUTSIDE, text)

    def _close(self, mark: str, kind: Kind = Kind.CLOSE) -> Iterator[Event]:
        field, was_open = self.current, self._is_open
        self.current, self._is_open = self._implicit, False
        self._reader = self._doubt = None
        if field is not None and was_open:
            yield Event(kind, field, mark)
