"""Reads regular expressions as llguidance does: their parts, and the characters that a part matches. Owns no state."""

import re
from collections.abc import Iterator

# Characters as pairs of code points, first and last.
Ranges = list[tuple[int, int]]
_LAST = 0x10FFFF
_DIGITS, _WORD = [(48, 57)], [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [(9, 13), (32, 32), (133, 133), (160, 160), (5760, 5760), (8192, 8202), (8232, 8233), (8239, 8239),
          (8287, 8287), (12288, 12288)]  # fmt: skip
# Classes inside classes, and what joins them.
_SETS = ("[", "&&", "--", "~~")
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_ESCAPE = re.compile(r"\\(?:(?:x|u00)([0-9A-Fa-f]{2})|[xu]\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
# Characters that JSON writes only as \u…, which llguidance never does.
UNWRITABLE = [(0, 7), (11, 11), (14, 31), (127, 127)]


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
    found, rest = list[str](), pattern
    while rest.startswith("^(?="):
        depth, end = 0, 1
        for part in parts(rest, 1):
            depth += (part == "(") - (part == ")")
            end += len(part)
            if not depth:
                break
        found.append(f"^(?:{rest[4 : end - 1]})")
        rest = "^" + rest[end:]
        if depth or rest.startswith(("^?", "^*", "^+", "^{")):
            return [pattern]
    is_whole = "(?=" not in "".join(found) + rest and not _has_alternatives(rest)
    return [*found, rest] if is_whole else [pattern]


def _has_alternatives(pattern: str) -> bool:
    """Whether it has any outside of groups."""
    depth = 0
    for part in parts(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            return True
    return False


def characters(part: str) -> Ranges:
    """The characters that a part matches which is a class, an escape or a character. Raises UnreadError."""
    if not part.startswith("["):
        return _of_one(part)
    is_negated = part.startswith("[^")
    inner = part[1 + is_negated : -1]
    if not inner or not part.endswith("]"):
        raise UnreadError
    found, at = Ranges(), 0
    while at < len(inner):
        if inner.startswith(_SETS, at):
            raise UnreadError
        end = _after_one(inner, at)
        some = _of_one(inner[at:end])
        if inner.startswith("-", end) and not inner.startswith("--", end) and end + 1 < len(inner):
            at, end = end + 1, _after_one(inner, end + 1)
            some = [(some[0][0], _of_one(inner[at:end])[0][1])]
        found += some
        at = end
    return without([(0, _LAST)], found) if is_negated else found


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters that are in none of the others."""
    found, others = Ranges(), sorted(others)
    for first, last in ranges:
        for low, high in others:
            if first <= min(last, low - 1):
                found.append((first, min(last, low - 1)))
            first = max(first, high + 1)
        if first <= last:
            found.append((first, last))
    return found


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
