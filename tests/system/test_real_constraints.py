"""Constraints through the whole service with the bundled model: valid outputs, also when workers or mask servers die.

Outputs are checked by jsonschema and re. The tests share one service, and each can run alone.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jsonschema
import psutil
import pytest

from tandem_client.errors import InvalidArgument
from tests.system.real_service import TIMEOUT_SECONDS, RealService, real_service

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
REGEX, CHOICES = "[A-Z][a-z]{2,8}( [a-z]{2,8}){3,6}", ["yes", "no", "perhaps not"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One constrained stream, and what its text must be."""

    options: dict[str, Any]
    check: Callable[[str], None]


def _is_object(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def _matches(text: str) -> None:
    assert re.fullmatch(REGEX, text), text


def _is_choice(text: str) -> None:
    assert text in CHOICES


ASKS = [
    Ask(options={"json_schema": SCHEMA, "max_new_tokens": 250}, check=_is_object),
    Ask(options={"regex": REGEX, "max_new_tokens": 100}, check=_matches),
    Ask(options={"choices": CHOICES, "max_new_tokens": 20}, check=_is_choice),
]


@pytest.fixture(scope="module")
def service() -> Iterator[RealService]:
    with real_service() as service:
        yield service


def texts(service: RealService, num_asks: int, during: Callable[[], object] = lambda: None) -> list[tuple[str, str]]:
    """The texts and finish reasons of asks that run at once, each with a seed of its own."""

    def read(i: int) -> tuple[str, str]:
        options = ASKS[i % len(ASKS)].options
        seed = {"temperature": 0.8, "top_p": 0.95, "seed": i}
        stream = service.client.generate("The animal", **options, **seed, timeout=TIMEOUT_SECONDS)
        text = "".join(delta.text for delta in stream)
        assert stream.finished is not None
        return text, stream.finished.reason.value

    with ThreadPoolExecutor(num_asks) as pool:
        found = [pool.submit(read, i) for i in range(num_asks)]
        during()
        return [each.result(TIMEOUT_SECONDS) for each in found]


def check(found: list[tuple[str, str]]) -> None:
    """All that ended by itself is valid; of the short ones all did."""
    for i, (text, reason) in enumerate(found):
        if i % len(ASKS) == 0 and reason == "length":
            continue
        assert reason in ("constraint_complete", "eos"), (text, reason)
        ASKS[i % len(ASKS)].check(text)


def mask_server(service: RealService) -> int:
    """The process that serves, a child of the one that forks it; 0 while there is none."""
    for process in psutil.Process(service.roomy.pid).children():
        if "gpu_worker.constraints" in process.cmdline():
            return next((child.pid for child in process.children()), 0)
    return 0


def test_outputs_satisfy_their_constraints_and_repeat(service: RealService) -> None:
    first = texts(service, 12)
    check(first)
    assert sum(reason != "length" for _, reason in first) >= 10
    assert len({text for text, _ in first}) > 6
    assert texts(service, 12) == first


def test_refusals_name_the_field_and_the_reason(service: RealService) -> None:
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        list(service.client.generate("x", json_schema={"type": "array", "uniqueItems": True}))
    with pytest.raises(InvalidArgument, match="regex"):
        list(service.client.generate("x", regex="("))


def test_killed_mask_servers_change_no_text(service: RealService) -> None:
    expected = texts(service, 12)

    killed = {0}

    def kill() -> None:
        # When all streams have ended, no other server starts.
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            if (process := mask_server(service)) not in killed:
                # One that ends twice before it has a mask blames the constraint.
                time.sleep(0.1)
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                killed.add(process)
            time.sleep(0.002)

    assert texts(service, 12, kill) == expected
    assert len(killed) > 2


@pytest.mark.long
def test_two_ranks_choose_tokens_by_the_masks_of_the_leader(service: RealService) -> None:
    expected = texts(service, 6)
    with real_service(flags=["--ranks", "2"]) as group:
        found = texts(group, 6)
    check(found)
    # Sums of two ranks round differently, and a draw may then be another token.
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 3


@pytest.mark.long
def test_a_killed_worker_changes_no_text(service: RealService) -> None:
    expected = texts(service, 12)
    service.start_small().wait_line("joined", TIMEOUT_SECONDS)
    assert texts(service, 12, service.roomy.kill) == expected
