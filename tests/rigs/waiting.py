"""How long a test waits for what must happen: one bound for all of them, so that a busy machine fails none.

A test that passes never waits until the bound, so it judges no time; it only ends a test that waits in vain.
pytest's own limit (pyproject.toml) is longer than several of these waits.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# tests/mutations wait shorter: with a fault in the source, an event that never comes is expected.
TIMEOUT_SECONDS = float(os.environ.get("TEST_WAIT_SECONDS", "240"))
# How long a lost stream may be continued: a worker may need minutes to start. It is the longest that a service allows.
LINGER_SECONDS = 600.0
_LOOK_SECONDS = 0.01


def until(condition: Callable[[], T], what: str = "") -> T:
    """Waits, by polling, for what has no event of its own. Returns what met the condition; `what` is named if it never
    comes."""
    limit = time.monotonic() + TIMEOUT_SECONDS
    while not (met := condition()):
        if time.monotonic() > limit:
            raise AssertionError(f"in {TIMEOUT_SECONDS:g} s it never came: {what or condition}")
        time.sleep(_LOOK_SECONDS)
    return met
