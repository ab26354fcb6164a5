"""The settings of `/set`: their names and how their values are read. Does no I/O."""

import json
from collections.abc import Callable, Mapping
from typing import Any


def _json_object(text: str) -> dict[str, Any]:
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value  # pyright: ignore[reportUnknownVariableType]


# Keywords of `generate`: how a value is read, and what it must be.
SETTINGS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "top_k": (int, "a whole number"),
    "min_p": (float, "a number"),
    "seed": (int, "a whole number"),
    "max_new_tokens": (int, "a whole number"),
    "presence_penalty": (float, "a number"),
    "frequency_penalty": (float, "a number"),
    "repetition_penalty": (float, "a number"),
    "template_args": (_json_object, 'a JSON object, such as {"enable_thinking": false}'),
}


def parse_setting(name: str, text: str) -> Any:
    """Returns the value of a setting; None for an empty text, which stands for the default. Raises ValueError."""
    if name not in SETTINGS:
        raise ValueError(f"{name[:40]!r} is no setting; there are {', '.join(SETTINGS)}")
    read, kind = SETTINGS[name]
    if not text:
        return None
    try:
        return read(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {text[:40]!r}; it must be {kind}") from None
