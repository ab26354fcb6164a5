"""The core's settings as JSON, as a record's header carries them. Owns the check that all of them are there.

Reads the fields from `CoreConfig`, its nested policy included, so a new setting needs no change here.
"""

import dataclasses
import json
from enum import StrEnum
from typing import Any, cast, get_type_hints

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.wire.arrays import WireError


def encode(config: CoreConfig) -> str:
    """Returns one JSON object with every field."""
    return json.dumps(dataclasses.asdict(config))


def decode(text: str) -> CoreConfig:
    """Raises WireError if a setting is unknown, missing or has a value that this program does not know."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise WireError(f"the core's settings are not JSON: {error}") from None
    return _decode(CoreConfig, values, "the core's settings")


def _decode(kind: Any, values: object, where: str) -> Any:
    types = get_type_hints(kind)
    if not isinstance(values, dict):
        raise WireError(f"{where}: {values!r} is not an object")
    given = cast("dict[str, object]", values)
    for problem, names in (("unknown", given.keys() - types.keys()), ("missing", types.keys() - given.keys())):
        if names:
            raise WireError(f"{where}: {', '.join(sorted(names))} {problem}; another version wrote this record")
    return kind(**{name: _value(types[name], given[name], name) for name in given})


def _value(kind: Any, value: object, name: str) -> object:
    if dataclasses.is_dataclass(kind):
        return _decode(kind, value, name)
    if issubclass(kind, StrEnum):
        if value not in list(kind):
            raise WireError(f"{name} is {value!r}; it must be one of {', '.join(kind)}")
        return kind(str(value))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise WireError(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value
