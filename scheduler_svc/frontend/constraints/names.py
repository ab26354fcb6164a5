"""Lists the names that a pattern of patternProperties matches, if they are few. Owns no state.

llguidance takes the names that are required or listed out of a pattern, and finds only in the middle of an output that
nothing is left. Only a pattern with few names can be used up, so those become properties before it is compiled.
"""

import re
import string

# Of one pattern.
MOST_NAMES = 64
_DIGITS, _WORD = string.digits, string.ascii_letters + string.digits + "_"
_CLASSES = {"d": _DIGITS, "w": _WORD}
# Classes of more characters than any limit.
_MANY = ("s", "S", "D", "W")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_GROUP = re.compile(r"\((\?:|\?P?<\w+>)?(?!\?)")
_BOUNDS = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
# What matches an empty text where it stands, or anything that is not read here.
_SPECIAL = frozenset("^$|)*+?{")


class UnreadError(Exception):
    """The pattern has a part that is not read here."""


def names_of(pattern: str, most: int) -> list[str] | None:
    """All texts in which the pattern is found, in order; None if they are more than `most`. Raises UnreadError."""
    reader = _Reader(pattern, most)
    found = reader.alternatives(is_whole=True)
    if reader.position < len(pattern):
        raise UnreadError
    return None if found is None else sorted(set(found))


class _Reader:
    """Reads a pattern from left to right. None stands for more texts than are wanted."""

    def __init__(self, pattern: str, most: int) -> None:
        self._pattern, self._most = pattern, most
        self.position = 0

    def alternatives(self, *, is_whole: bool = False) -> list[str] | None:
        found: list[str] | None = []
        while True:
            # A pattern that does not begin and end with anchors is found inside other texts too.
            begins = not is_whole or self._skip("^")
            texts = self._sequence()
            ends = not is_whole or self._skip("$")
            found = None if found is None or texts is None or not (begins and ends) else self._few(found + texts)
            if not self._skip("|"):
                return found

    def _sequence(self) -> list[str] | None:
        found: list[str] | None = [""]
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)$":
            found = self._joined(found, self._repeated(self._part()))
        return found

    def _repeated(self, texts: list[str] | None) -> list[str] | None:
        low, high = 1, 1
        if self._skip("?"):
            low = 0
        elif self._skip("*") or self._skip("+"):
            self._check_quantifier()
            return None
        elif (bounds := _BOUNDS.match(self._pattern, self.position)) is not None:
            self.position = bounds.end()
            low = int(bounds[1])
            if bounds[2] and not bounds[3]:
                self._check_quantifier()
                return None
            high = int(bounds[3] or low)
        self._check_quantifier()
        every: list[str] | None = [] if low else [""]
        power: list[str] | None = [""]
        for count in range(1, high + 1):
            power = self._joined(power, texts)
            if power is None or every is None:
                return None
            every = self._few(every + power) if count >= low else every
        return every

    def _part(self) -> list[str] | None:
        char = self._pattern[self.position]
        if char == "(":
            group = _GROUP.match(self._pattern, self.position)
            if group is None:
                raise UnreadError
            self.position = group.end()
            found = self.alternatives()
            if not self._skip(")"):
                raise UnreadError
            return found
        if char == "[":
            texts = self._class()
            return None if texts is None else self._few(texts)
        if char in _SPECIAL:
            raise UnreadError
        self.position += 1
        if char == "." or (char == "\\" and self._peek() in _MANY):
            self.position += char == "\\"
            return None
        return self._few(self._escape()) if char == "\\" else [char]

    def _check_quantifier(self) -> None:
        # A lazy quantifier matches the same texts.
        self._skip("?")
        if self._peek() in ("?", "*", "+", "{"):
            raise UnreadError

    def _escape(self) -> list[str]:
        char = self._take()
        if char in _CLASSES:
            return list(_CLASSES[char])
        if char in _CONTROLS:
            return [_CONTROLS[char]]
        if char.isalnum():
            raise UnreadError
        return [char]

    def _class(self) -> list[str] | None:
        self.position += 1
        found: list[str] = []
        is_many = self._skip("^")
        if self._peek() == "]":
            raise UnreadError
        while (char := self._take()) != "]":
            if char in "[&~":
                raise UnreadError
            if char == "\\" and self._peek() in _MANY:
                self.position += 1
                is_many = True
                continue
            texts = self._escape() if char == "\\" else [char]
            if self._peek() == "-" and len(texts) == 1 and self._pattern[self.position + 1 : self.position + 2] != "]":
                self.position += 1
                last = self._take()
                if last == "\\":
                    last = self._escape()[0]
                texts = [chr(code) for code in range(ord(texts[0]), min(ord(last), ord(texts[0]) + self._most) + 1)]
            found += texts
        return None if is_many else found

    def _joined(self, one: list[str] | None, other: list[str] | None) -> list[str] | None:
        if one is None or other is None or len(one) * len(other) > 8 * self._most:
            return None
        return self._few([first + second for first in one for second in other])

    def _few(self, texts: list[str]) -> list[str] | None:
        texts = list(dict.fromkeys(texts))
        return None if len(texts) > self._most else texts

    def _peek(self) -> str:
        return self._pattern[self.position : self.position + 1]

    def _take(self) -> str:
        if self.position >= len(self._pattern):
            raise UnreadError
        self.position += 1
        return self._pattern[self.position - 1]

    def _skip(self, char: str) -> bool:
        is_next = self._peek() == char
        self.position += is_next
        return is_next
