"""Reads what a region of calls encloses, to distinguish its end mark from text that reads the same. Pure.

An end mark inside a string or a value of an argument is text. A reader gets the text of one region up to each mark, and
says whether the mark may be part of it. Where no reader can follow, the first end mark counts, as in Transformers.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from scheduler_svc.frontend.chat.json_stream import ObjectReader
from scheduler_svc.frontend.text.marked import marked

_SPACE = " \t\n\r"
_SIGNS = ",:}]"
# White space between the end of a value and what follows it.
MAX_BETWEEN = 64


class Reader(Protocol):
    """Reads one region, from the end of its first mark on."""

    # Signs read outside of strings and values: what stands before one was text for certain.
    num_signs: int
    # The text is not what the region should enclose.
    is_broken: bool

    def feed(self, text: str) -> object:
        """Reads more text."""
        ...

    def takes(self, char: str) -> bool:
        """Whether a mark that begins with this character may be text here. `char` is empty for a mark without text."""
        ...


def reader_of(field: Any) -> Reader | None:
    """The reader for a field of a response template; None if its text has no form."""
    args: dict[str, Any] = field.content_args
    if field.content == "json":
        return QuotedReader(args.get("string_delims", ())) if args else ObjectReader(tops="{[")
    parts = _parts(args.get("tag_pattern") or "") if field.content == "xml-inline" else None
    return None if parts is None else TaggedReader(*parts, field.close_re)


class QuotedReader:
    """JSON in a dialect: only its strings are known, in quotation marks or between marks of their own."""

    def __init__(self, delims: Sequence[Sequence[str]]) -> None:
        """`delims`: the marks before and after a string."""
        self._delims = [(open_, close) for open_, close in delims]
        # Text that is not read yet, because it may begin a mark.
        self._pending = ""
        # The mark that ends the string that is being read; empty outside of strings.
        self._close = ""
        self._is_after_string = False
        self.num_signs = 0
        self.is_broken = False

    def feed(self, text: str) -> None:
        """Reads more text."""
        text, at = self._pending + text, 0
        while at < len(text) and not self.is_broken:
            length = self._in_string(text, at) if self._close else self._outside(text, at)
            if not length:
                break
            at += length
        self._pending = text[at:]

    def takes(self, char: str) -> bool:
        """Whether a string is being read."""
        return bool(char) and bool(self._close) and not self.is_broken

    def _in_string(self, text: str, at: int) -> int:
        """Returns the number of characters that were read, 0 if more are needed."""
        if self._close == '"' and text[at] == "\\":
            return 2 if at + 1 < len(text) else 0
        if text.startswith(self._close, at):
            length, self._close, self._is_after_string = len(self._close), "", True
            return length
        return 0 if self._close.startswith(text[at:]) else 1

    def _outside(self, text: str, at: int) -> int:
        if self._is_after_string and text[at] not in _SPACE:
            self.is_broken = text[at] not in _SIGNS
            self.num_signs += 1
            self._is_after_string = False
            return 1
        for open_, close in [*self._delims, ('"', '"')]:
            if text.startswith(open_, at):
                self._close = close
                return len(open_)
            if open_.startswith(text[at:]):
                return 0
        return 1


class TaggedReader:
    """Arguments between tags. `head` and `tail` match what a tag has before and after its value, `tag` all of it.

    A value may have the text of `tail`. In a string of JSON it is text. Elsewhere the value ends there if only white
    space stands between it and the next `head`, or `close`, which ends the region; if not, it is text too. A text that
    looks like both, one after the other, ends the value: nothing tells it from the end.
    """

    def __init__(self, tag: Any, head: Any, tail: Any, close: Any) -> None:
        self._tag, self._head, self._tail = tag, head, tail
        self._follows = [pattern for pattern in (head, close) if pattern is not None]
        self._pending: str = ""
        # What is read, and what of it belongs to the tag that is being read; empty outside of tags.
        self._read, self._in_tag = list[str](), list[str]()
        # Reads a value that begins as JSON.
        self._json: ObjectReader | None = None
        # What is pending may be the end of the value.
        self._may_end = False
        self.num_signs = 0
        self.is_broken = False

    @property
    def text(self) -> str:
        """All that was read. An end inside a value has its last character marked, so that no pattern finds it."""
        return "".join([*self._read, *self._in_tag, self._pending])

    def feed(self, text: str) -> None:
        """Reads more text."""
        text, at, self._may_end = self._pending + text, 0, False
        while not self.is_broken:
            pattern = self._tail if self._in_tag else self._head
            mark: Any = pattern.search(text, at, partial=True)
            end: int = len(text) if mark is None else mark.start()
            if self._in_tag:
                self._take(text[at:end])
            else:
                self._read.append(text[at:end])
            at = end
            if mark is None or mark.partial:
                break
            is_end = not self._in_tag or self._is_end(text, mark.end())
            if is_end is None:
                break
            at = mark.end()
            if not self._in_tag:
                self._in_tag, self._json = [mark.group()], None
            elif is_end:
                self._end_tag(mark.group())
            else:
                self._take(mark.group(), mark.group()[:-1] + marked(mark.group()[-1]))
        self._pending = text[at:]

    def takes(self, char: str) -> bool:
        """Whether a value is being read."""
        return bool(char) and bool(self._in_tag) and not self._may_end and not self.is_broken

    def _take(self, text: str, kept: str | None = None) -> None:
        """Reads text of a value, and keeps it in this form."""
        if len(self._in_tag) == 1 and text.lstrip(_SPACE)[:1] in ("{", "["):
            self._json = ObjectReader(tops="{[")
        if self._json is not None:
            self._json.feed(text)
        if text.strip(_SPACE):
            self._in_tag.append(text if kept is None else kept)
        else:
            # The value has not begun.
            self._in_tag[-1] += text

    def _is_end(self, text: str, after: int) -> bool | None:
        """Whether the value ends before `after`; None if it is not known yet."""
        if self._json is not None and self._json.is_complete:
            return True
        if self._json is not None and self._json.takes("<"):
            # A string of JSON has no line break.
            if after == len(text):
                return None
            if text[after] >= " ":
                return False
        next_ = after
        while next_ < min(len(text), after + MAX_BETWEEN) and text[next_] in _SPACE:
            next_ += 1
        if next_ == len(text):
            self._may_end = True
            return None
        found = [match for each in self._follows if (match := each.match(text, next_, partial=True)) is not None]
        if any(not match.partial for match in found):
            return True
        return None if found else False

    def _end_tag(self, mark: str) -> None:
        tag = "".join(self._in_tag) + mark
        self.is_broken = self._tag.fullmatch(tag) is None
        self.num_signs += 1
        self._read.append(tag)
        self._in_tag = []


@functools.lru_cache(maxsize=16)
def _parts(tag: str) -> tuple[Any, Any, Any] | None:
    """The pattern of a tag, of what it has before its value, and of what follows; None if it has no such parts."""
    # Installed with Transformers.
    import regex

    before, found, rest = tag.partition("(?P<value>")
    for at in range(len(rest)):
        if found and rest[at] == ")":
            try:
                # The group is whole where what is in it is a pattern by itself.
                regex.compile(rest[:at])
                head, tail = regex.compile(before, regex.DOTALL), regex.compile(rest[at + 1 :], regex.DOTALL)
            except regex.error:
                continue
            is_empty = head.fullmatch("") is not None or tail.fullmatch("") is not None
            return None if is_empty else (regex.compile(tag, regex.DOTALL), head, tail)
    return None
