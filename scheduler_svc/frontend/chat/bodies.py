"""Reads what a region of calls encloses, to distinguish its end mark from text that reads the same. Pure.

An end mark inside a string or a value of an argument is text. A reader gets the text of one region up to each mark, and
says whether the mark may be part of it. Where no reader can follow, the first end mark counts, as in Transformers.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, Protocol, cast

from scheduler_svc.frontend.chat.json_stream import ObjectReader

_SPACE = " \t\n\r"
_SIGNS = ",:}]"


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
    return None if parts is None else TaggedReader(*parts)


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
    """Arguments between tags. `head` and `tail` match what a tag has before and after its value, `tag` all of it."""

    def __init__(self, tag: Any, head: Any, tail: Any) -> None:
        self._tag, self._head, self._tail = tag, head, tail
        self._pending: str = ""
        # The tag that is being read, up to what is pending; empty outside of tags.
        self._read: str = ""
        self.num_signs = 0
        self.is_broken = False

    def feed(self, text: str) -> None:
        """Reads more text."""
        text, at = self._pending + text, 0
        self._pending = ""
        while not self.is_broken:
            mark: re.Match[str] | None = (self._tail if self._read else self._head).search(text, at, partial=True)
            end = len(text) if mark is None else mark.start()
            if self._read:
                self._read += text[at:end]
            if mark is None or cast(Any, mark).partial:
                self._pending = text[end:]
                return
            at = mark.end()
            if not self._read:
                self._read = mark.group()
                continue
            self.is_broken = self._tag.fullmatch(self._read + mark.group()) is None
            self._read = ""
            self.num_signs += 1

    def takes(self, char: str) -> bool:
        """Whether a value is being read."""
        return bool(char) and bool(self._read) and not self.is_broken


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
