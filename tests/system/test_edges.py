"""Fields at their limits and beyond them, over real gRPC: the right status code, naming field, value and limit.

A front end with a core of the tests has all fields: `tests/scheduler_svc/frontend/sizes/test_table.py`.
"""

import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tandem.v1 import control_pb2
from tandem.v1 import inference_pb2 as pb

from tests.rigs.streams import code_of, details_of
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask, answer
from tests.system.conftest import Served

MAX_LENGTH, VOCAB = 512, 288
PROMPT = (1, 2, ord("a"))
ROOM = MAX_LENGTH - len(PROMPT)

Edit = Callable[[pb.GenerateRequest], Any]


def _set(path: str, value: Any) -> Edit:
    def edit(request: pb.GenerateRequest) -> None:
        *parents, name = path.split(".")
        part: Any = request
        for parent in parents:
            part = getattr(part, parent)
        if isinstance(value, list):
            del getattr(part, name)[:]
            getattr(part, name).extend(value)
        else:
            setattr(part, name, value)

    return edit


INFINITY, NAN = float("inf"), float("nan")
MAX32, MAX64 = 2**32 - 1, 2**64 - 1

# Field, value, and the limit that the message must name.
REFUSED: list[tuple[str, Any, str]] = [
    *[("sampling.temperature", value, "100") for value in (-1.0, -1e-6, 100.01, 1e38, NAN, INFINITY, -INFINITY)],
    *[("stop.min_new_tokens", value, "max_new_tokens, here 5") for value in (6, MAX_LENGTH + 1, 2**31, MAX32)],
    *[("stop.stop_token_ids", [value], str(VOCAB)) for value in (VOCAB, 2**31 - 1, 2**31, MAX32)],
    ("stop.stop_strings", [""], "1"),
    *[("token_ids.ids", [1, value], str(VOCAB)) for value in (VOCAB, 2**31 - 1, 2**31, MAX32)],
    ("token_ids.ids", [], "1"),
    ("text", "", "1"),
    ("request_id", "a\nb", "printable"),
    ("text", "y" * (MAX_LENGTH + 1), str(MAX_LENGTH)),
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


def _name(case: tuple[Any, ...]) -> str:
    value = repr(case[1])
    return f"{case[0]}={value if len(value) < 20 else value[:12] + '...'}"


def _base() -> pb.GenerateRequest:
    return Ask(prompt=PROMPT, max_new_tokens=5).request()


@pytest.mark.parametrize("case", REFUSED, ids=_name)
def test_a_value_beyond_its_limit_is_refused(served: Served, case: tuple[str, Any, str]) -> None:
    field, value, limit = case
    request = _base()
    _set(field, value)(request)
    if field == "token_ids.ids":
        request.token_ids.SetInParent()
    error = served.caller.generate(request).failed()
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details_of(error)["BadRequest"].field_violations
    # A list's entry may be named by its index; a prompt's length is a violation of `prompt`.
    assert violation.field.startswith(field) or (field == "text" and violation.field == "prompt")
    assert limit in error.details()
    assert violation.description == error.details()


@pytest.mark.parametrize("case", ACCEPTED, ids=_name)
def test_a_value_at_its_limit_is_served(served: Served, case: tuple[str, Any]) -> None:
    field, value = case
    request = _base()
    _set(field, value)(request)
    transcript = served.caller.generate(request).result()
    assert transcript.finished.output_tokens >= 1


@pytest.mark.parametrize("asked", [ROOM, ROOM + 1, 2**31 - 1])
def test_max_new_tokens_beyond_the_context_ends_context_full(served: Served, asked: int) -> None:
    whole = Ask(prompt=PROMPT, max_new_tokens=ROOM)
    request = whole.request()
    request.stop.max_new_tokens = asked
    transcript = served.caller.generate(request).result()
    assert transcript.accepted.max_new_tokens == ROOM
    assert transcript.tokens == whole.expected().tokens
    ended = pb.FINISH_REASON_LENGTH if asked == ROOM else pb.FINISH_REASON_CONTEXT_FULL
    assert transcript.finished.reason == ended


def test_a_missing_or_too_long_prompt_is_refused(served: Served) -> None:
    request = _base()
    request.ClearField("prompt")
    error = served.caller.generate(request).failed()
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["BadRequest"].field_violations[0].field == "prompt"
    request = _base()
    _set("token_ids.ids", [1] * MAX_LENGTH)(request)
    request.stop.ClearField("max_new_tokens")
    error = served.caller.generate(request).failed()
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert str(MAX_LENGTH) in error.details()
    assert str(MAX_LENGTH - 1) in error.details()


def test_an_unknown_model_is_not_found(served: Served) -> None:
    request = _base()
    request.model = "another"
    error = served.caller.generate(request).failed()
    assert code_of(error) == grpc.StatusCode.NOT_FOUND
    assert "another" in error.details()
    assert "checking" in error.details()


# Field 1000 as a varint.
UNKNOWN = b"\xc0\x3e\x01"


@pytest.mark.parametrize("part", ["", "sampling", "stop", "output", "token_ids", "cache"])
def test_an_unknown_field_is_refused_at_every_level(served: Served, part: str) -> None:
    request = _base()
    target = getattr(request, part) if part else request
    target.MergeFromString(UNKNOWN)
    error = served.caller.generate(request).failed()
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert "1000" in error.details()


def test_malformed_bytes_are_refused(served: Served) -> None:
    with grpc.insecure_channel(served.caller.address) as channel:
        call = channel.unary_stream("/tandem.v1.InferenceService/Generate")
        for data in (b"\xff\xff\xff", struct.pack("<I", 77) * 5, b"\x0a\xff"):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(data, timeout=TIMEOUT_SECONDS))
            assert code_of(caught.value) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert served.caller.load().workers == 1


def test_a_message_beyond_max_message_bytes_is_refused(served: Served) -> None:
    request = _base()
    request.token_ids.ids.extend([1] * (5 << 20))
    error = served.caller.generate(request).failed()
    assert code_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    ask = Ask(prompt=PROMPT, max_new_tokens=5)
    answer(served.caller, ask)


def test_control_calls_refuse_values_beyond_their_limits(served: Served) -> None:
    caller = served.caller
    for ids in ([], ["x"] * 1025, ["y" * 203]):
        with pytest.raises(grpc.RpcError) as caught:
            caller.abort(*ids)
        assert code_of(caught.value) == grpc.StatusCode.INVALID_ARGUMENT
    assert caller.abort(*["x"] * 1024) == [control_pb2.ABORT_OUTCOME_NOT_FOUND] * 1024
    for tokens in ([VOCAB], [MAX32]):
        with pytest.raises(grpc.RpcError) as caught:
            caller.detokenize(tokens)
        assert code_of(caught.value) == grpc.StatusCode.INVALID_ARGUMENT
    info = caller.model_info()
    assert (info.model, info.vocab_size, info.max_length, info.page_size) == ("checking", VOCAB, MAX_LENGTH, 4)
    assert (info.num_pages, info.max_rows, info.token_budget) == (255, 16, 64)
    assert info.has_tokenizer
