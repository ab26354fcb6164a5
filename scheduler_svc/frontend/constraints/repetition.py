"""How often a regular expression repeats its smallest part. Owns no state; reads the text once.

`((x{10}){20}){30}` repeats x 6,000 times. `*` and `+` count as 1, because llguidance does not unroll them. The measure
reads only escapes, classes, groups and quantifiers. Whether the expression is valid is llguidance's to say.
"""

import re

from scheduler_svc.frontend.constraints.limits import MAX_DEPTH, MAX_REPETITION, GrammarError, too_large
from scheduler_svc.frontend.constraints.patterns import after_class

# Possessive, because what follows one part can never be part of it: nothing is tried twice.
_BOUNDS = re.compile(r"\{\s*+(\d*+)\s*+(,?+)\s*+(\d*+)\s*+\}")
# More digits than any limit.
_MAX_DIGITS = 9


def bound_of(first: str, last: str) -> int:
    """The larger number of a quantifier's two, at least 1."""
    return max(1, _number(first), _number(last))


def _number(digits: str) -> int:
    """The number, or one beyond any limit if it has many digits."""
    return int(digits or 0) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS


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


def check_pattern(field: str, pattern: str) -> int:
    """`repetition`, and refuses an empty pattern."""
    if not pattern:
        raise GrammarError(f"{field} is empty; a pattern has at least 1 character")
    return repetition(field, pattern)
