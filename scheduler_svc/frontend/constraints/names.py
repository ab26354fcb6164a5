"""Lists the names that a pattern of patternProperties matches, if they are few. Owns no state.

llguidance takes the names that are required or listed out of a pattern, and finds only in the middle of an output that
nothing is left. So a pattern with few names becomes properties before it is compiled.
"""

import re

from scheduler_svc.frontend.constraints.patterns import UNWRITABLE, UnreadError, characters, parts, without

# Of one pattern.
MOST_NAMES = 64
_GROUP = re.compile(r"\((\?:|\?P?<\w+>)?(?!\?)")
_BOUNDS = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
# What matches an empty text where it stands, or anything that is not read here.
_SPECIAL = frozenset("^$|)*+?{")


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
            if texts != []:
                found = None if found is None or texts is None or not (begins and ends) else self._few(found + texts)
            if not self._skip("|"):
                return found

    def _sequence(self) -> list[str] | None:
        found: list[str] | None = [""]
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)$":
            found = self._joined(found, self._repeated(self._part()))
        return found

    def _repeated(self, texts: list[str] | None) -> list[str] | None:
        low: int = 1
        high: int | None = 1
        if self._skip("?"):
            low = 0
        elif self._skip("*"):
            low, high = 0, None
        elif self._skip("+"):
            high = None
        elif (bounds := _BOUNDS.match(self._pattern, self.position)) is not None:
            self.position = bounds.end()
            low = int(bounds[1])
            high = None if bounds[2] and not bounds[3] else int(bounds[3] or low)
        self._check_quantifier()
        if texts == []:
            return [] if low else [""]
        if high is None:
            return None
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
        if char in _SPECIAL:
            raise UnreadError
        part = next(parts(self._pattern, self.position))
        self.position += len(part)
        if char == ".":
            return None
        found = without(characters(part), UNWRITABLE)
        if sum(last - first + 1 for first, last in found) > self._most:
            return None
        return self._few([chr(code) for first, last in found for code in range(first, last + 1)])

    def _check_quantifier(self) -> None:
        # A lazy quantifier matches the same texts.
        self._skip("?")
        if self._peek() in ("?", "*", "+", "{"):
            raise UnreadError

    def _joined(self, one: list[str] | None, other: list[str] | None) -> list[str] | None:
        if [] in (one, other):
            return []
        if one is None or other is None or len(one) * len(other) > 8 * self._most:
            return None
        return self._few([first + second for first in one for second in other])

    def _few(self, texts: list[str]) -> list[str] | None:
        texts = list(dict.fromkeys(texts))
        return None if len(texts) > self._most else texts

    def _peek(self) -> str:
        return self._pattern[self.position : self.position + 1]

    def _skip(self, char: str) -> bool:
        is_next = self._peek() == char
        self.position += is_next
        return is_next
