"""Numbers with their noun, for messages and tables of every program."""

# The verbs of messages that are not made by an "s".
_IS = {"are": "is", "were": "was", "go": "goes"}


def numbered(number: int, thing: str, verb: str = "") -> str:
    """Text such as "1 worker" or "2000 workers", with the number as a setting would have it.

    With the verb `wait`: "1 request waits", "2 requests wait".
    """
    return f"{number} {_noun(number, thing, verb)}"


def counted(number: int, thing: str, verb: str = "") -> str:
    """Text such as "1 worker" or "2,000 workers", or with a verb as `numbered`."""
    return f"{number:,} {_noun(number, thing, verb)}"


def _noun(number: int, thing: str, verb: str) -> str:
    if number == 1:
        return f"{thing} {_IS.get(verb, f'{verb}s')}" if verb else thing
    if thing.endswith(("s", "x", "ch", "sh")):
        many = f"{thing}es"
    else:
        many = f"{thing[:-1]}ies" if thing.endswith("y") and thing[-2] not in "aeiou" else f"{thing}s"
    return f"{many} {verb}" if verb else many
