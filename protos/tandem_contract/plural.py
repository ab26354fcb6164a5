"""Numbers with their noun, for messages and tables of every program."""

import re

# The verbs of messages that are not made by an "s".
_IS = {"are": "is", "were": "was", "have": "has", "do": "does", "go": "goes"}


def numbered(number: int, thing: str, verb: str = "") -> str:
    """Text such as "1 worker" or "2000 workers", with the number as a setting would have it.

    With the verb `wait`: "1 request waits", "2 requests wait". A thing may go on with `of` or `to`: "2 pages of it".
    """
    return f"{number} {_noun(number, thing, verb)}"


def counted(number: int, thing: str, verb: str = "") -> str:
    """Text such as "1 worker" or "2,000 workers", or with a verb as `numbered`."""
    return f"{number:,} {_noun(number, thing, verb)}"


def _noun(number: int, thing: str, verb: str) -> str:
    if number == 1:
        return f"{thing} {_IS.get(verb, f'{verb}s')}" if verb else thing
    head, *rest = re.split("(?= of | to )", thing, maxsplit=1)
    if head.endswith(("s", "x", "ch", "sh")):
        many = f"{head}es"
    else:
        many = f"{head[:-1]}ies" if head.endswith("y") and head[-2] not in "aeiou" else f"{head}s"
    return f"{many}{''.join(rest)} {verb}".rstrip()
