"""Replaces paths of API fields (`stop.stop_strings[0]`) in messages by keywords or flags.

Owns the replacement. Each caller has its own table of names.
"""

import re
from collections.abc import Mapping

_INDEX = re.compile(r"\[\d+\]")


def name_of(field: str, names: Mapping[str, str]) -> str:
    """Returns the name of a path, with its index: `stop.stop_strings[0]` is `stop[0]`. Keeps an unknown path.

    An entry of the table with empty brackets names a field inside a list: `chat.messages[].tool_calls[].name`.
    """
    if (named := names.get(_INDEX.sub("[]", field))) is not None:
        indices = iter(_INDEX.findall(field))
        return re.sub(r"\[\]", lambda _: next(indices, "[]"), named)
    known = field.partition("[")[0]
    # A path inside a field that is known: `constraint.json_schema.properties.a`.
    while known not in names and known.count(".") > 1:
        known = known.rpartition(".")[0]
    return names.get(known, known) + field[len(known) :]


def with_names(message: str, names: Mapping[str, str], *, field: str | None = None) -> str:
    """Returns the message with each path replaced by its name.

    A path without a dot may be an ordinary word. It is replaced only at the message's start, and only if `field`, the
    field at fault, is that path.
    """
    if field is not None and message.startswith(field):
        message = name_of(field, names) + message[len(field) :]
    dotted = sorted((path for path in names if "." in path and "[" not in path), key=len, reverse=True)
    if not dotted:
        return message
    known = "|".join(map(re.escape, dotted))
    return re.sub(rf"(?<![\w.])(?:{known})(?!\w)", lambda found: names[found[0]], message)
