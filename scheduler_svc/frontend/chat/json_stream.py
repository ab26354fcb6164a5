"""Owns the reading of one JSON object, or list, whose text arrives in pieces: how far it is one for certain. Pure.

Strings are certain letter by letter, numbers and words at their end. So the certain texts, joined, always begin a JSON
object, and are one when the object is complete.
"""

import re
from enum import Enum

# As deep as the reader of whole calls goes safely.
MAX_DEPTH = 64
MAX_WORD_CHARS = 64
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = ("true", "false", "null")
_ESCAPES = '"\\/bfnrtu'
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"


class _Next(Enum):
    """What the text may go on with."""

    VALUE = "value"
    KEY = "key"
    KEY_OR_END = "key or end"
    VALUE_OR_END = "value or end"
    COLON = "colon"
    COMMA_OR_END = "comma or end"


class ObjectReader:
    """Reads one object, from its first brace on. `tops`: the braces that may be the first one."""

    __slots__ = (
        *("_escape", "_in_string", "_is_key", "_next", "_stack", "_tops", "_word"),
        *("is_broken", "is_complete", "num_signs"),
    )

    def __init__(self, tops: str = "{") -> None:
        self._tops = tops
        self._stack: list[str] = []
        self._next = _Next.VALUE
        self._in_string = self._is_key = False
        # What each missing letter of an escape may be.
        self._escape: list[str] = []
        # A number or a word that may go on.
        self._word = ""
        self.is_complete = False
        self.is_broken = False
        # Of the signs that end something: , : } ]
        self.num_signs = 0

    def feed(self, text: str) -> tuple[str, int]:
        """Returns (what became certain, how many characters were read). It stops behind the object, and at an error."""
        certain = list[str]()
        for num_read, char in enumerate(text):
            if self.is_complete or self.is_broken:
                return "".join(certain), num_read
            if self._word and not self._in_word(char):
                certain.append(self._end_word())
            if not self.is_broken and not self._word:
                self._read(char)
                if not self._word and not self.is_broken:
                    certain.append(char)
            if self.is_broken:
                return "".join(certain), num_read
        return "".join(certain), len(text)

    def takes(self, char: str) -> bool:
        """Whether this character is text of a string here, white space, or a brace that ends something."""
        if not char or self.is_complete or self.is_broken:
            return False
        if self._in_string:
            return char in self._escape[0] if self._escape else char >= " "
        return char in _SPACE or (char in "}]" and self._may_end(char))

    @property
    def held(self) -> str:
        """What was read and is not certain."""
        return self._word

    def _in_word(self, char: str) -> bool:
        if char.isascii() and (char.isalnum() or char in "+-."):
            self.is_broken = len(self._word) == MAX_WORD_CHARS
            self._word += "" if self.is_broken else char
            return True
        return False

    def _end_word(self) -> str:
        word = self._word
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            self.is_broken = True
            return ""
        self._word, self._next = "", _Next.COMMA_OR_END
        return word

    def _read(self, char: str) -> None:
        if self._in_string:
            self._read_string(char)
        elif char in _SPACE:
            pass
        elif char == '"' and self._next is not _Next.COLON and self._next is not _Next.COMMA_OR_END and self._stack:
            self._is_key = self._next in (_Next.KEY, _Next.KEY_OR_END)
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
            self._word = char
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
            self._next = _Next.COLON if self._is_key else _Next.COMMA_OR_END
        else:
            self.is_broken = char < " "
