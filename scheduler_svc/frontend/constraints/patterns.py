"""Reads regular expressions as llguidance does: their parts, how often they repeat them, and the texts that they match.

Owns no state. Whether an expression is valid is llguidance's to say.

`((x{10}){20}){30}` repeats x 6,000 times. `*` and `+` count as 1, because llguidance does not unroll them. That measure
reads only escapes, classes, groups and quantifiers, and reads the text once.
"""

import re
from collections.abc import Iterator

from scheduler_svc.frontend.constraints.limits import MAX_DEPTH, MAX_REPETITION, too_large

# Characters as pairs of code points, first and last.
Ranges = list[tuple[int, int]]
_LAST = 0x10FFFF
_DIGITS, _WORD = [(48, 57)], [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [(9, 13), (32, 32), (133, 133), (160, 160), (5760, 5760), (8192, 8202), (8232, 8233), (8239, 8239),
          (8287, 8287), (12288, 12288)]  # fmt: skip
# Classes inside classes, and what joins them.
_SETS = ("[", "&&", "--", "~~")
# An escape or a character, and those that a line of a grammar has in another form: an escaped line break is one too.
_ONE = re.compile(r"\\?.", re.DOTALL)
_IN_ONE_LINE = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_ESCAPE = re.compile(r"\\(?:(?:x|u00)([0-9A-Fa-f]{2})|[xu]\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
# Characters that JSON writes only as \u…, which llguidance never does.
UNWRITABLE = [(0, 7), (11, 11), (14, 31), (127, 127)]
# Possessive, because what follows one part can never be part of it: nothing is tried twice.
_BOUNDS = re.compile(r"\{\s*+(\d*+)\s*+(,?+)\s*+(\d*+)\s*+\}")
# More digits than any limit.
_MAX_DIGITS = 9
MOST_NAMES = 64
_GROUP = re.compile(r"\((\?:|\?P?<\w+>)?(?!\?)")
# A lazy quantifier matches the same texts.
_QUANTIFIER = re.compile(r"(?:([?*+])|\{(\d{1,4})(,(\d{0,4}))?\})?\??")
_COUNTS: dict[str | None, tuple[int, int | None]] = {None: (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
_ANCHORS = frozenset(("^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z"))
_ANY_TEXT = "(?s:.*)"
# What matches an empty text where it stands, or anything that is not read here.
_SPECIAL = frozenset("^$|)*+?{")


class UnreadError(Exception):
    """The pattern has a part that is not read here."""


def parts(pattern: str, at: int = 0) -> Iterator[str]:
    """The classes, escapes and other characters of a pattern from a position on, in order."""
    while at < len(pattern):
        end = after_class(pattern, at) if pattern[at] == "[" else _after_one(pattern, at)
        yield pattern[at:end]
        at = end


def after_class(pattern: str, position: int) -> int:
    """The position behind a class such as [a-z], [[:alpha:]] or [a&&[b]]."""
    depth = 0
    while position < len(pattern):
        char = pattern[position]
        depth += (char == "[") - (char == "]")
        position += 2 if char == "\\" else 1
        if depth == 0:
            return position
    return position


def without_lookahead(pattern: str) -> list[str]:
    """Patterns that match together what this one does: `^(?=a)b` is `^(?:a)` and `^b`."""
    heads, rest = list[str](), pattern
    while rest.startswith("^(?="):
        depth, end = 0, 1
        for part in parts(rest, 1):
            depth += (part == "(") - (part == ")")
            end += len(part)
            if not depth:
                break
        heads.append(f"^(?:{rest[4 : end - 1]})")
        rest = "^" + rest[end:]
        if depth or rest.startswith(("^?", "^*", "^+", "^{")):
            return [pattern]
    is_whole = "(?=" not in "".join(heads) + rest and not _has_alternatives(rest)
    return [*heads, rest] if is_whole else [pattern]


def _has_alternatives(pattern: str) -> bool:
    """Whether it has any outside of groups."""
    depth = 0
    for part in parts(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            return True
    return False


def whole(pattern: str) -> str:
    """The expression of the texts in which a pattern finds something. Raises UnreadError for anchors inside it."""
    pieces = list(parts(pattern))
    begins, ends = pieces[:1] == ["^"], pieces[1:][-1:] == ["$"]
    inner = pieces[begins : len(pieces) - ends]
    if not _ANCHORS.isdisjoint(inner) or ((begins or ends) and _has_alternatives(pattern)):
        raise UnreadError
    return f"{'' if begins else _ANY_TEXT}(?:{''.join(inner)}){'' if ends else _ANY_TEXT}"


def between_slashes(pattern: str) -> str:
    """A pattern between slashes in one line of a grammar."""
    return _ONE.sub(lambda one: _IN_ONE_LINE.get(one[0], one[0]), pattern)


def characters(part: str) -> Ranges:
    """The characters that a part matches which is a class, an escape or a character. Raises UnreadError."""
    if not part.startswith("["):
        return _of_one(part)
    is_negated = part.startswith("[^")
    inner = part[1 + is_negated : -1]
    if not inner or not part.endswith("]"):
        raise UnreadError
    ranges, at = Ranges(), 0
    while at < len(inner):
        if inner.startswith(_SETS, at):
            raise UnreadError
        end = _after_one(inner, at)
        some = _of_one(inner[at:end])
        if inner.startswith("-", end) and not inner.startswith("--", end) and end + 1 < len(inner):
            at, end = end + 1, _after_one(inner, end + 1)
            some = [(some[0][0], _of_one(inner[at:end])[0][1])]
        ranges += some
        at = end
    return without([(0, _LAST)], ranges) if is_negated else ranges


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters that are in none of the others."""
    left, others = Ranges(), sorted(others)
    for first, last in ranges:
        for low, high in others:
            if first <= min(last, low - 1):
                left.append((first, min(last, low - 1)))
            first = max(first, high + 1)
        if first <= last:
            left.append((first, last))
    return left


def _after_one(pattern: str, at: int) -> int:
    """The position behind an escape or a character."""
    escape = _ESCAPE.match(pattern, at)
    return at + 1 if escape is None else escape.end()


def _of_one(part: str) -> Ranges:
    escape = _ESCAPE.fullmatch(part)
    if escape is None:
        return [(ord(part), ord(part))]
    if (char := escape[4]) is None:
        code = int(escape[1] or escape[2] or escape[3], 16)
        return [(code, code)]
    if char.lower() in _CLASSES:
        return _CLASSES[char] if char in _CLASSES else without([(0, _LAST)], _CLASSES[char.lower()])
    if char.isalnum() and char not in _CONTROLS:
        raise UnreadError
    code = _CONTROLS.get(char, ord(char))
    return [(code, code)]


def bound_of(first: str, last: str) -> int:
    """The larger number of a quantifier's two, at least 1, and beyond any limit if it has many digits."""
    return max(1, *(int(digits or 0) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS for digits in (first, last)))


def repetition(field: str, pattern: str) -> int:
    """Returns the largest product of nested repetitions, at least 1. Raises GrammarError beyond a limit."""
    # The measure of each open group so far, and of the last part in it.
    groups, last, largest = [1], [1], 1
    position = 0
    while position < len(pattern):
        char = pattern[position]
        quantifier = _BOUNDS.match(pattern, position) if char == "{" else None
        if quantifier is not None:
            last[-1] *= bound_of(quantifier[1], quantifier[3])
            position = quantifier.end()
        else:
            if char == "(":
                groups.append(1)
                last.append(1)
                if len(groups) > MAX_DEPTH + 1:
                    raise too_large(field, "groups are nested", len(groups) - 1, MAX_DEPTH, " deep")
            elif char == ")" and len(groups) > 1:
                inner = groups.pop()
                last.pop()
                last[-1] = inner
            elif char not in "*+?":
                last[-1] = 1
            position = after_class(pattern, position) if char == "[" else position + (2 if char == "\\" else 1)
        groups[-1] = max(groups[-1], last[-1])
        largest = max(largest, last[-1])
        if largest > MAX_REPETITION:
            raise too_large(field, "nested repetitions make", largest, MAX_REPETITION)
    return largest


def names_of(pattern: str, most: int) -> list[str] | None:
    """All texts in which the pattern is found, in order; None if they are more than `most`. Raises UnreadError."""
    reader = _Reader(pattern, most)
    names = reader.alternatives(is_whole=True)
    if reader.position < len(pattern):
        raise UnreadError
    return None if names is None else sorted(set(names))


class _Reader:
    """Reads a pattern from left to right. None stands for more texts than are wanted."""

    def __init__(self, pattern: str, most: int) -> None:
        self._pattern, self._most = pattern, most
        self.position = 0

    def alternatives(self, *, is_whole: bool = False) -> list[str] | None:
        names: list[str] | None = []
        while True:
            # A pattern that does not begin and end with anchors is found inside other texts too.
            begins = not is_whole or self._skip("^")
            texts = self._sequence()
            ends = not is_whole or self._skip("$")
            if texts != []:
                names = None if names is None or texts is None or not (begins and ends) else self._few(names + texts)
            if not self._skip("|"):
                return names

    def _sequence(self) -> list[str] | None:
        names: list[str] | None = [""]
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)$":
            names = self._joined(names, self._repeated(self._part()))
        return names

    def _repeated(self, texts: list[str] | None) -> list[str] | None:
        quantifier = _QUANTIFIER.match(self._pattern, self.position)
        assert quantifier is not None
        self.position = quantifier.end()
        low, high = _COUNTS[quantifier[1]]
        if quantifier[2]:
            low = int(quantifier[2])
            high = None if quantifier[3] and not quantifier[4] else int(quantifier[4] or low)
        if self._peek() in ("?", "*", "+", "{"):
            raise UnreadError
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
            names = self.alternatives()
            if not self._skip(")"):
                raise UnreadError
            return names
        if char in _SPECIAL:
            raise UnreadError
        part = next(parts(self._pattern, self.position))
        self.position += len(part)
        if char == ".":
            return None
        ranges = without(characters(part), UNWRITABLE)
        if sum(last - first + 1 for first, last in ranges) > self._most:
            return None
        return self._few([chr(code) for first, last in ranges for code in range(first, last + 1)])

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
