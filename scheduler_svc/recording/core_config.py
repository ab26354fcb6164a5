"""The core's settings as JSON, as a record's header carries them. Owns the check that all of them are there.

Reads the fields from `CoreConfig`, its nested policy included, so a new setting needs no change here.
"""

import json
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.wire.arrays import WireError

_CONFIG = TypeAdapter(CoreConfig)


def encode(config: CoreConfig) -> str:
    """Returns one JSON object with every field."""
    return json.dumps(asdict(config))


def decode(text: str) -> CoreConfig:
    """Raises WireError if a setting is unknown, missing or has a value that this program does not know."""
    try:
        config = _CONFIG.validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{name}: " for name in problem["loc"])
        raise WireError(f"the core's settings: {where}{problem['msg']}") from None
    given, known = _names(json.loads(text)), _names(asdict(config))
    for problem, names in (("unknown", given - known), ("missing", known - given)):
        if names:
            listed = ", ".join(sorted(names))
            raise WireError(f"the core's settings: {listed} {problem}; another version wrote this record")
    return config


def _names(settings: dict[str, Any]) -> set[str]:
    """Returns the names of the settings, those of the policy included."""
    return settings.keys() | settings.get("policy", {}).keys()
