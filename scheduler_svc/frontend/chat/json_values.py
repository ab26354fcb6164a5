"""Owns the reading of JSON that a caller sends inside a field: only an object, bounded in depth, and UTF-8 throughout.

Knows nothing of chats. Every refusal is INVALID_ARGUMENT.
"""

import json
from typing import Any, NoReturn, cast

from scheduler_svc.frontend.rpc import status

MAX_DEPTH = 64


def read_object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises Refusal."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # A string may hold half of a surrogate pair, which no tokenizer takes.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep(field, f"more than {MAX_DEPTH}") from None
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise status.invalid(
            field, f"{field} has {code}, half of a surrogate pair; only whole pairs are text"
        ) from None
    except ValueError as error:
        raise status.invalid(field, f"{field} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise status.invalid(field, f"{field} is a JSON {_kind(value)}; it must be an object")
    found = cast(dict[str, Any], value)
    if (depth := _depth(found)) > MAX_DEPTH:
        raise _too_deep(field, str(depth))
    return found


def nearest_object(text: str) -> dict[str, Any]:
    """An object in place of text that `read_object` refuses.

    `null`, `""` and `[]` are an empty one, and an object that was written as a string is that object. All other text
    is an entry of its own, so nothing is lost.
    """
    try:
        value: object = json.loads(text)
        if value is None or value in ("", []):
            return {}
        if isinstance(value, str):
            return read_object("", value)
    except (ValueError, RecursionError, status.Refusal):
        pass
    return {"arguments": text}


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            inner
            for each in cast(list[dict[str, object] | list[object]], level)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: object) -> str:
    kinds: dict[type, str] = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _too_deep(field: str, depth: str) -> status.Refusal:
    return status.invalid(field, f"{field} is nested {depth} deep; the limit is {MAX_DEPTH}")
