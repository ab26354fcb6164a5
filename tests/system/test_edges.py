"""Fields at their limits through the whole service, which serves them, and what a refusal looks like over real gRPC.

A front end with a core of the tests has all fields: `tests/scheduler_svc/frontend/sizes/test_table.py`.
"""

from typing import Any

import grpc
import pytest
from tandem.v1 import inference_pb2 as pb

from tests.rigs.streams import code_of, details_of
from tests.system.asks import Ask
from tests.system.conftest import Served

MAX_LENGTH, VOCAB = 512, 288
PROMPT = (1, 2, ord("a"))
ROOM = MAX_LENGTH - len(PROMPT)
MAX32, MAX64 = 2**32 - 1, 2**64 - 1

# Field, value, and the limit that the message must name.
REFUSED: list[tuple[str, Any, str]] = [
    ("sampling.temperature", float("nan"), "100"),
    ("stop.min_new_tokens", MAX32, "max_new_tokens, here 5"),
    ("stop.stop_token_ids", [MAX32], str(VOCAB)),
    ("token_ids.ids", [1, VOCAB], str(VOCAB)),
]
ACCEPTED: list[tuple[str, Any]] = [
    *[("sampling.temperature", value) for value in (0.0, 1e-30, 100.0)],
    *[("sampling.top_p", value) for value in (0.0, 1e-30, 1.0)],
    *[("sampling.min_p", value) for value in (0.0, 1.0)],
    *[("sampling.typical_p", value) for value in (1e-30, 1.0)],
    *[("sampling.top_k", value) for value in (0, 1, VOCAB)],
    *[("sampling.seed", value) for value in (0, 2**31, 2**63, MAX64)],
    *[("stop.max_new_tokens", value) for value in (1, ROOM)],
    *[("stop.min_new_tokens", value) for value in (0, 5)],
    *[("stop.max_time_seconds", value) for value in (60.0, 604_800.0)],
    *[("stop.stop_token_ids", value) for value in ([0], [VOCAB - 1], list(range(256)))],
    ("stop.stop_strings", ["\0" * 256] * 16),
    *[("priority", value) for value in (-1000, 1000)],
    ("request_id", "é" * 128),
    ("cache.salt", "é" * 256),
    *[("token_ids.ids", value) for value in ([0], [VOCAB - 1], [1] * (MAX_LENGTH - 5))],
    ("text", "y" * (MAX_LENGTH - 5)),
    ("model", "checking"),
]


def request(path: str, value: Any) -> pb.GenerateRequest:
    """A request for five tokens with this value."""
    made = Ask(prompt=PROMPT, max_new_tokens=5).request()
    *parents, name = path.split(".")
    part: Any = made
    for parent in parents:
        part = getattr(part, parent)
    if isinstance(value, list):
        del getattr(part, name)[:]
        getattr(part, name).extend(value)
    else:
        setattr(part, name, value)
    return made


def test_a_value_beyond_its_limit_is_refused_by_field_and_limit(served: Served) -> None:
    for field, value, limit in REFUSED:
        error = served.caller.generate(request(field, value)).failed()
        assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
        [violation] = details_of(error)["BadRequest"].field_violations
        # A list's entry may be named by its index.
        assert violation.field.startswith(field) and limit in error.details()
        assert violation.description == error.details()


def test_values_at_their_limits_are_served(served: Served) -> None:
    streams = [served.caller.generate(request(*case)) for case in ACCEPTED]
    assert [case for case, stream in zip(ACCEPTED, streams, strict=True) if not stream.result().finished] == []
    assert all(stream.transcript.finished.output_tokens >= 1 for stream in streams)


@pytest.mark.parametrize("asked", [ROOM, ROOM + 1, 2**31 - 1])
def test_max_new_tokens_beyond_the_context_ends_context_full(served: Served, asked: int) -> None:
    whole = Ask(prompt=PROMPT, max_new_tokens=ROOM)
    transcript = served.caller.generate(request("stop.max_new_tokens", asked)).result()
    assert transcript.accepted.max_new_tokens == ROOM
    ended = pb.FINISH_REASON_LENGTH if asked == ROOM else pb.FINISH_REASON_CONTEXT_FULL
    assert (transcript.tokens, transcript.finished.reason) == (whole.expected().tokens, ended)
