"""Replaces paths of API fields (`stop.stop_strings[0]`) in messages by keywords or flags.

Owns the replacement. Each caller has its own table of names.
"""

import re
from collections.abc import Mapping

_INDEXED = re.compile(r"(?P<path>[^\[]*)(?P<index>.*)", re.DOTALL)


def name_of(field: str, names: Mapping[str, str]) -> str:
    """Returns the name of a path, with its index: `stop.stop_strings[0]` is `stop[0]`. Keeps an unknown path."""
    found = _INDEXED.fullmatch(field)
    assert found is not None, "the pattern takes any text"
    return names.get(found["path"], found["path"]) + found["index"]


def with_names(message: str, names: Mapping[str, str], *, field: str | None = None) -> str:
    """Returns the message with each path replaced by its name.

    A path without a dot may be an ordinary word. It is replaced only at the message's start, and only if `field`, the
    field at fault, is that path.
    """
    if field is not None and message.startswith(field):
        message = name_of(field, names) + message[len(field) :]
    dotted = sorted((path for path in names if "." in path), key=len, reverse=True)
    if not dotted:
        return message
    known = "|".join(map(re.escape, dotted))
    return re.sub(rf"(?<![\w.])(?:{known})(?!\w)", lambda found: names[found[0]], message)
