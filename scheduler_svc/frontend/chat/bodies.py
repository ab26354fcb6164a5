"""Reads what a region of calls encloses, to distinguish its end mark from text that reads the same. Pure.

An end mark inside a string or a value of an argument is text. A reader gets the text of one region up to each mark, and
says whether the mark may be part of it. Where no reader can follow, the first end mark counts, as in Transformers.

A JSON object is certain letter by letter in its strings, and at their ends in numbers and words. So the certain texts,
joined, always begin a JSON object, and are one when the object is complete.

In a marked text the first character of a control token is half of a surrogate pair, which no decoded text has: so
ordinary text that reads like the token stays text. Marked and plain text are equally long.
"""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

from scheduler_svc.frontend.text.detokenize import Decode

_FIRST, _NUM = 0xDC00, 0x100
_PLAIN = {_FIRST + code: code for code in range(_NUM)}
# As deep as the reader of whole calls goes safely.
MAX_DEPTH = 64
MAX_WORD_CHARS = 64
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# One without its end goes to the end of the text, so that none is read twice.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_WORDS = ("true", "false", "null")
_ESCAPES = '"\\/bfnrtu'
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_SIGNS = ",:}]"
# White space between the end of a value and what follows it.
MAX_BETWEEN = 64


def marked(control: str) -> str:
    """The text of a control token, marked. One that does not begin with a letter of Latin-1 stays as it is."""
    return chr(_FIRST + ord(control[0])) + control[1:] if control and ord(control[0]) < _NUM else control


def plain(text: str) -> str:
    """The text as callers see it."""
    return text if text.isascii() else text.translate(_PLAIN)


def mark_all(text: str, controls: Collection[str]) -> str:
    """`text`, a text or a regular expression, with every text of a control token marked."""
    texts = {form(mark): marked(mark)[0] + form(mark[1:]) for mark in controls for form in (str, re.escape)}
    if not texts:
        return text
    longest_first = sorted(texts, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda match: texts[match.group()], text)


def marking(decode: Decode, controls: Mapping[int, str]) -> Decode:
    """A decode function that marks these control tokens."""

    def decode_marked(tokens: list[int]) -> str:
        text = decode(tokens)
        if controls.keys().isdisjoint(tokens):
            return text
        for idx, token in enumerate(tokens):
            if (control := controls.get(token)) is not None:
                # What a decoder makes of white space at the cut may differ, but not by more.
                at = text.find(control, max(0, len(decode(tokens[:idx])) - 1))
                if at >= 0:
                    text = text[:at] + marked(control) + text[at + len(control) :]
        return text

    return decode_marked


class _Next(Enum):
    """What the text may go on with."""

    VALUE = "value"
    KEY = "key"
    KEY_OR_END = "key or end"
    VALUE_OR_END = "value or end"
    COLON = "colon"
    COMMA_OR_END = "comma or end"


class ObjectReader:
    """Reads one object, from its first brace on. `tops`: the braces that may be the first one.

    Models write line breaks and tabs into strings: what is certain has their escapes. `is_strict`: they are errors.
    """

    def __init__(self, tops: str = "{", *, is_strict: bool = False) -> None:
        self._tops, self._is_strict = tops, is_strict
        self._stack: list[str] = []
        self._next = _Next.VALUE
        self._in_string = False
        # What each missing letter of an escape may be.
        self._escape: list[str] = []
        # A number or a word that may go on: read, and not certain.
        self.held = ""
        self.is_complete = False
        self.is_broken = False
        # The number of signs that end something: , : } ]
        self.num_signs = 0

    def feed(self, text: str) -> tuple[str, int]:
        """Returns (what became certain, how many characters were read). It stops behind the object, and at an error."""
        certain = list[str]()
        for num_read, char in enumerate(text):
            if self.is_complete or self.is_broken:
                return "".join(certain), num_read
            if self.held and not self._in_word(char):
                certain.append(self._end_word())
            if not self.is_broken and not self.held:
                was_in_string = self._in_string
                self._read(char)
                if not self.held and not self.is_broken:
                    certain.append(escape_control(char) if was_in_string and char < " " else char)
            if self.is_broken:
                return "".join(certain), num_read
        return "".join(certain), len(text)

    def takes(self, char: str) -> bool:
        """Whether this character is text of a string here, white space, or a brace that ends something."""
        if not char or self.is_complete or self.is_broken:
            return False
        if self._in_string:
            return char in self._escape[0] if self._escape else char >= " " or not self._is_strict
        return char in _SPACE or (char in "}]" and self._may_end(char))

    def _in_word(self, char: str) -> bool:
        if char.isascii() and (char.isalnum() or char in "+-."):
            self.is_broken = len(self.held) == MAX_WORD_CHARS
            self.held += "" if self.is_broken else char
            return True
        return False

    def _end_word(self) -> str:
        word = self.held
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            self.is_broken = True
            return ""
        self.held, self._next = "", _Next.COMMA_OR_END
        return word

    def _read(self, char: str) -> None:
        if self._in_string:
            self._read_string(char)
        elif char in _SPACE:
            pass
        elif char == '"' and self._next is not _Next.COLON and self._next is not _Next.COMMA_OR_END and self._stack:
            self._in_string = True
        elif char in "{[" and self._next in (_Next.VALUE, _Next.VALUE_OR_END) and (self._stack or char in self._tops):
            self._stack.append(char)
            self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
            self.is_broken = len(self._stack) > MAX_DEPTH
        elif char in "}]" and self._may_end(char):
            self._stack.pop()
            self.num_signs += 1
            self._next = _Next.COMMA_OR_END
            self.is_complete = not self._stack
        elif char == "," and self._next is _Next.COMMA_OR_END:
            self.num_signs += 1
            self._next = _Next.KEY if self._stack[-1] == "{" else _Next.VALUE
        elif char == ":" and self._next is _Next.COLON:
            self.num_signs += 1
            self._next = _Next.VALUE
        elif self._stack and self._next in (_Next.VALUE, _Next.VALUE_OR_END) and (char in "-tfn" or char in _DIGITS):
            self.held = char
        else:
            self.is_broken = True

    def _may_end(self, char: str) -> bool:
        if not self._stack or (self._stack[-1] == "{") != (char == "}"):
            return False
        empty = _Next.KEY_OR_END if char == "}" else _Next.VALUE_OR_END
        return self._next in (_Next.COMMA_OR_END, empty)

    def _read_string(self, char: str) -> None:
        if self._escape:
            allowed = self._escape.pop(0)
            self.is_broken = char not in allowed
            if allowed == _ESCAPES and char == "u":
                self._escape = [_HEX] * 4
        elif char == "\\":
            self._escape = [_ESCAPES]
        elif char == '"':
            self._in_string = False
            self._next = _Next.COLON if self._next in (_Next.KEY, _Next.KEY_OR_END) else _Next.COMMA_OR_END
        else:
            self.is_broken = char < " " and self._is_strict


def escape_control(char: str) -> str:
    """A control character as a string of JSON has it."""
    return json.dumps(char)[1:-1]


def escape_controls(text: str) -> str:
    """JSON text with the control characters in its strings escaped."""
    return _STRING.sub(lambda string: _CONTROL.sub(lambda char: escape_control(char.group()), string.group()), text)


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
    looks like both, one after the other, ends the value: it cannot be distinguished from the end.
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
            self._json = ObjectReader(tops="{[", is_strict=True)
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
        matches = [match for sign in self._follows if (match := sign.match(text, next_, partial=True)) is not None]
        if any(not match.partial for match in matches):
            return True
        return None if matches else False

    def _end_tag(self, mark: str) -> None:
        tag = "".join(self._in_tag) + mark
        self.is_broken = self._tag.fullmatch(tag) is None
        self.num_signs += 1
        self._read.append(tag)
        self._in_tag = []


# Each reads one region, from the end of its first mark on. `takes` says whether a mark that begins with a character may
# be text there; the character is empty for a mark without text. `num_signs` counts the signs read outside of strings
# and values: what stands before one was text for certain. `is_broken`: the text is not what the region should enclose.
Reader = ObjectReader | QuotedReader | TaggedReader


def reader_of(field: Any) -> Reader | None:
    """The reader for a field of a response template; None if its text has no form."""
    args: dict[str, Any] = field.content_args
    if field.content == "json":
        return QuotedReader(args.get("string_delims", ())) if args else ObjectReader(tops="{[")
    parts = _parts(args.get("tag_pattern") or "") if field.content == "xml-inline" else None
    return None if parts is None else TaggedReader(*parts, field.close_re)


@functools.lru_cache(maxsize=16)
def _parts(tag: str) -> tuple[Any, Any, Any] | None:
    """The pattern of a tag, of what it has before its value, and of what follows; None if it has no such parts."""
    # Installed with Transformers.
    import regex

    before, mark, rest = tag.partition("(?P<value>")
    for at in range(len(rest)):
        if mark and rest[at] == ")":
            try:
                # The group is whole where what is in it is a pattern by itself.
                regex.compile(rest[:at])
                head, tail = regex.compile(before, regex.DOTALL), regex.compile(rest[at + 1 :], regex.DOTALL)
            except regex.error:
                continue
            is_empty = head.fullmatch("") is not None or tail.fullmatch("") is not None
            return None if is_empty else (regex.compile(tag, regex.DOTALL), head, tail)
    return None
