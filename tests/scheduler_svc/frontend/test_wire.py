"""Every field at its edges and beyond: the right code, naming field, number and limit. No server, no sockets."""

import asyncio
import math
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend import model as models
from scheduler_svc.frontend import wire
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.status import Refusal
from tests.scheduler_svc.frontend.fake_core import model_state
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS

MODEL = models.load(model_state())
BARE = models.load(model_state(has_tokenizer=False))
VOCAB = MODEL.info.vocab_size
MAX_LENGTH = MODEL.info.max_length
# Values of a float32 next to 1 and 100.
ABOVE_1 = float(np.nextafter(np.float32(1), np.float32(2)))
ABOVE_100 = float(np.nextafter(np.float32(100), np.float32(200)))


def submit(served: Model = MODEL, **fields: Any) -> frontend_pb2.Submit:
    """What the core would get. Raises Refusal."""
    if "text" not in fields and "token_ids" not in fields:
        fields["token_ids"] = pb.TokenIds(ids=[1, 2, 3])
    return submit_message(pb.GenerateRequest(**fields), served)


def submit_message(request: pb.GenerateRequest, model: Model = MODEL) -> frontend_pb2.Submit:
    checked = wire.check_request(request, model)
    ids = asyncio.run(wire.prompt_ids(request, model))
    return wire.make_submit(checked, ids, model, stream=7, deadline_seconds=1.5)


def refusal(**fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        submit(**fields)
    return caught.value


def field_of(refused: Refusal) -> str:
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    (detail,) = refused.details
    assert isinstance(detail, error_details_pb2.BadRequest)
    (violation,) = detail.field_violations
    assert violation.description == refused.message
    return violation.field


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingParams(**fields)}


def stop(**fields: Any) -> dict[str, Any]:
    return {"stop": pb.StopParams(**fields)}


def prompt(*ids: int) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=ids)}


REFUSED = [
    # Field, the request, what the message must say beside the field.
    ("sampling.temperature", sampling(temperature=-1), ["-1", "0", "100"]),
    ("sampling.temperature", sampling(temperature=-1e-9), ["0", "100"]),
    ("sampling.temperature", sampling(temperature=ABOVE_100), ["100.0000076", "100"]),
    ("sampling.temperature", sampling(temperature=2.0**31), ["2147483648", "100"]),
    ("sampling.temperature", sampling(temperature=2.0**63), ["100"]),
    ("sampling.temperature", sampling(temperature=math.nan), ["nan", "100"]),
    ("sampling.temperature", sampling(temperature=math.inf), ["inf", "100"]),
    ("sampling.temperature", sampling(temperature=-math.inf), ["-inf", "100"]),
    ("sampling.top_p", sampling(top_p=0), ["0", "above 0", "1"]),
    ("sampling.top_p", sampling(top_p=-1), ["-1", "1", "above 0, and at most 1"]),
    ("sampling.top_p", sampling(top_p=ABOVE_1), ["1.00000011", "1", "above 0, and at most 1"]),
    ("sampling.top_p", sampling(top_p=2.0**31), ["2147483648", "1"]),
    ("sampling.top_p", sampling(top_p=math.nan), ["nan", "1", "above 0, and at most 1"]),
    ("sampling.top_p", sampling(top_p=math.inf), ["inf", "1"]),
    ("sampling.min_p", sampling(min_p=-1), ["-1", "0", "1"]),
    ("sampling.min_p", sampling(min_p=ABOVE_1), ["1.00000011", "1"]),
    ("sampling.min_p", sampling(min_p=2.0**63), ["1"]),
    ("sampling.min_p", sampling(min_p=math.nan), ["nan", "1"]),
    ("sampling.min_p", sampling(min_p=-math.inf), ["-inf", "1"]),
    ("sampling.top_k", sampling(top_k=VOCAB + 1), [VOCAB + 1, VOCAB]),
    ("sampling.top_k", sampling(top_k=2**31), [2**31, VOCAB]),
    ("sampling.top_k", sampling(top_k=2**32 - 1), [2**32 - 1, VOCAB]),
    ("stop.max_new_tokens", stop(max_new_tokens=0), [0, 1]),
    ("stop.max_new_tokens", stop(max_new_tokens=MAX_LENGTH - 2), [MAX_LENGTH - 2, MAX_LENGTH - 3, MAX_LENGTH, 3]),
    ("stop.max_new_tokens", stop(max_new_tokens=MAX_LENGTH + 1), [MAX_LENGTH + 1, f"the limit is {MAX_LENGTH - 3}"]),
    ("stop.max_new_tokens", stop(max_new_tokens=2**31), [2**31, f"the limit is {MAX_LENGTH - 3}"]),
    ("stop.max_new_tokens", stop(max_new_tokens=2**32 - 1), [2**32 - 1, MAX_LENGTH]),
    ("stop.min_new_tokens", stop(max_new_tokens=5, min_new_tokens=6), [6, 5]),
    ("stop.min_new_tokens", stop(min_new_tokens=101), [101, 100]),
    ("stop.min_new_tokens", stop(min_new_tokens=2**31), [2**31, 100]),
    ("stop.max_time_seconds", stop(max_time_seconds=0), [0, "above 0"]),
    ("stop.max_time_seconds", stop(max_time_seconds=-1), [-1, 604800]),
    ("stop.max_time_seconds", stop(max_time_seconds=604800.001), ["604800.001", 604800]),
    ("stop.max_time_seconds", stop(max_time_seconds=2.0**63), [604800]),
    ("stop.max_time_seconds", stop(max_time_seconds=math.nan), ["nan", 604800]),
    ("stop.max_time_seconds", stop(max_time_seconds=math.inf), ["inf", 604800]),
    ("stop.stop_token_ids[1]", stop(stop_token_ids=[0, VOCAB]), [VOCAB]),
    ("stop.stop_token_ids[0]", stop(stop_token_ids=[2**32 - 1]), [2**32 - 1, VOCAB]),
    ("stop.stop_token_ids", stop(stop_token_ids=[1] * 257), [257, 256]),
    ("stop.stop_strings", stop(stop_strings=["a"] * 17), [17, 16]),
    ("stop.stop_strings[1]", stop(stop_strings=["a", ""]), ["empty"]),
    ("stop.stop_strings[0]", stop(stop_strings=["é" * 257]), [257, 256]),
    ("priority", {"priority": 1001}, [1001, 1000]),
    ("priority", {"priority": -1001}, [-1001, -1000]),
    ("priority", {"priority": 2**31 - 1}, [2**31 - 1, 1000]),
    ("priority", {"priority": -(2**31)}, [-(2**31), -1000]),
    ("request_id", {"request_id": "x" * 129}, [129, 128]),
    ("request_id", {"request_id": "a\nb"}, ["U+000A", "character 1"]),
    ("request_id", {"request_id": "\x7f"}, ["U+007F", "character 0"]),
    ("token_ids.ids", prompt(), ["empty", 1]),
    ("token_ids.ids[2]", prompt(0, 1, VOCAB), [VOCAB]),
    ("token_ids.ids[0]", prompt(2**31), [2**31, VOCAB]),
    ("token_ids.ids[0]", prompt(2**32 - 1), [2**32 - 1, VOCAB]),
    ("prompt", prompt(*[1] * MAX_LENGTH), [MAX_LENGTH, MAX_LENGTH - 1]),
    ("prompt", prompt(*[1] * 100_000), [100_000, MAX_LENGTH - 1]),
    ("prompt", {"text": "a" * MAX_LENGTH}, [MAX_LENGTH, MAX_LENGTH - 1]),
    ("text", {"text": ""}, ["empty", 1]),
    ("text", {"text": "x" * (MAX_LENGTH * 5 + 1)}, [MAX_LENGTH * 5 + 1, MAX_LENGTH * 5]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_with_field_number_and_limit(field: str, fields: dict[str, Any], said: list[object]):
    refused = refusal(**fields)
    assert field_of(refused) == field
    for word in [field, *said]:
        assert str(word) in refused.message
    assert refused.retry_after_seconds is None


ACCEPTED = [
    sampling(temperature=0),
    sampling(temperature=100),
    sampling(top_p=1),
    sampling(top_p=float(np.nextafter(np.float32(0), np.float32(1)))),
    sampling(min_p=0),
    sampling(min_p=1),
    sampling(top_k=0),
    sampling(top_k=VOCAB),
    sampling(seed=0),
    sampling(seed=2**64 - 1),
    stop(max_new_tokens=1),
    stop(max_new_tokens=MAX_LENGTH - 3),
    stop(max_new_tokens=5, min_new_tokens=5),
    stop(min_new_tokens=0),
    stop(max_time_seconds=1e-9),
    stop(max_time_seconds=604800),
    stop(stop_token_ids=[0, VOCAB - 1]),
    stop(stop_token_ids=[1] * 256),
    stop(stop_strings=["x" * 256] * 16),
    {"priority": 1000},
    {"priority": -1000},
    {"request_id": "é" * 128},
    {"model": "toy"},
    prompt(0, VOCAB - 1),
    prompt(*[1] * (MAX_LENGTH - 1)),
    {"text": "a" * (MAX_LENGTH - 1)},
    {"text": "\0"},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda value: str(value)[:40])
def test_accepted_at_the_edge(fields: dict[str, Any]):
    assert submit(**fields).stream == 7


def test_no_prompt():
    with pytest.raises(Refusal) as caught:
        submit_message(pb.GenerateRequest())
    assert field_of(caught.value) == "prompt"


def test_another_model():
    refused = refusal(model="other")
    assert refused.code is grpc.StatusCode.NOT_FOUND
    assert "'other'" in refused.message
    assert "'toy'" in refused.message


def test_unset_fields_take_the_models_defaults():
    made = submit()
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.5, np.float32(0.9), 40, 0.125)
    assert made.max_new_tokens == 100
    assert (made.min_new_tokens, made.ignore_eos, made.priority) == (0, False, 0)
    assert (made.max_time_seconds, made.deadline_seconds) == (0.0, 1.5)


def test_set_fields_win_over_defaults_also_where_they_are_zero():
    made = submit(**sampling(temperature=0, top_k=0, min_p=0, seed=0))
    assert (made.temperature, made.top_k, made.min_p, made.seed) == (0.0, 0, 0.0, 0)


def test_unset_seeds_differ():
    assert len({submit().seed for _ in range(20)}) == 20


def test_unset_max_new_tokens_is_what_fits():
    assert submit(**prompt(*[1] * (MAX_LENGTH - 5))).max_new_tokens == 5


def test_request_ids_are_assigned_and_kept():
    assert submit(request_id="mine").request_id == "mine"
    assert submit().request_id != submit().request_id != ""


def test_arrays_are_little_endian_int32():
    made = submit(**prompt(1, 2, VOCAB - 1), **stop(stop_token_ids=[5, 5, 6]))
    assert np.frombuffer(made.prompt, "<i4").tolist() == [1, 2, VOCAB - 1]
    assert np.frombuffer(made.stop_token_ids, "<i4").tolist() == [5, 6]


def test_text_is_tokenized_with_special_tokens_as_they_are_spelled():
    made = submit(text=f"{BOS}the")
    assert np.frombuffer(made.prompt, "<i4").tolist() == [MODEL.text._tokenizer.token_to_id(BOS), 258]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "a"}, "text"),
        (stop(stop_strings=["a"]), "stop.stop_strings"),
        ({"output": pb.OutputParams(want_text=True)}, "output.want_text"),
    ],
)
def test_text_needs_a_tokenizer(fields: dict[str, Any], field: str):
    assert field_of(refusal(served=BARE, **fields)) == field


def test_tokens_do_not():
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
    assert wire.check_request(request, BARE).want_text is False
    assert wire.check_request(request, MODEL).want_text is True


# Field 1000, a varint.
UNKNOWN = b"\xc0\x3e\x05"


def test_unknown_fields_at_the_top():
    with pytest.raises(Refusal) as caught:
        submit_message(pb.GenerateRequest.FromString(pb.GenerateRequest(text="a").SerializeToString() + UNKNOWN))
    assert field_of(caught.value) == "GenerateRequest.1000"
    assert "field number 1000" in caught.value.message


@pytest.mark.parametrize("inner", ["token_ids", "sampling", "stop", "output"])
def test_unknown_fields_inside(inner: str):
    number = pb.GenerateRequest.DESCRIPTOR.fields_by_name[inner].number
    data = bytes([number << 3 | 2, len(UNKNOWN)]) + UNKNOWN
    with pytest.raises(Refusal) as caught:
        submit_message(pb.GenerateRequest.FromString(data))
    name = pb.GenerateRequest.DESCRIPTOR.fields_by_name[inner].message_type.name
    assert field_of(caught.value) == f"{name}.1000"


def test_every_field_with_limits_has_rows_here():
    """A field added to the proto must be added to the tables above."""
    covered = {field.partition("[")[0] for field, _, _ in REFUSED}
    unlimited = {"model", "sampling.seed", "stop.ignore_eos", "stop.include_stop"}
    # The length of a prompt, and what any prompt field is called in its own message.
    covered -= {"prompt"}
    found: set[str] = set()
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        if field.name == "output":
            continue
        inner = field.message_type.fields if field.message_type else ()
        found |= {f"{field.name}.{part.name}" for part in inner} or {field.name}
    assert found == covered | unlimited


numbers = st.sampled_from([0, 1, 5, VOCAB - 1, VOCAB, MAX_LENGTH, 2**31 - 1, 2**31, 2**32 - 1])
floats = st.floats(width=32) | st.sampled_from([0.0, 1.0, 100.0])
requests = st.builds(
    pb.GenerateRequest,
    request_id=st.text(max_size=3),
    model=st.sampled_from(["", "toy", "other"]),
    token_ids=st.builds(pb.TokenIds, ids=st.lists(numbers, max_size=3)),
    sampling=st.builds(pb.SamplingParams, temperature=floats, top_p=floats, top_k=numbers, min_p=floats),
    stop=st.builds(
        pb.StopParams,
        max_new_tokens=numbers,
        min_new_tokens=numbers,
        stop_strings=st.lists(st.text(max_size=2), max_size=2),
        stop_token_ids=st.lists(numbers, max_size=2),
        max_time_seconds=st.floats(),
    ),
    priority=st.integers(-(2**31), 2**31 - 1),
)


@given(requests | st.binary(max_size=40))
def test_whatever_is_sent_is_accepted_or_refused(sent: pb.GenerateRequest | bytes):
    made, refused = None, None
    try:
        made = submit_message(pb.GenerateRequest.FromString(sent) if isinstance(sent, bytes) else sent)
    except DecodeError:
        return
    except Refusal as error:
        refused = error
    if made is None:
        assert refused.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert len(refused.message) < 300
        return
    assert 1 <= made.max_new_tokens <= MAX_LENGTH - len(made.prompt) // 4
    assert 0 <= made.temperature <= 100
    assert 0 < made.top_p <= 1
    assert 0 <= made.min_p <= 1


class TestDetokenize:
    def refusal(self, ids: list[int], model: Model = MODEL) -> str:
        with pytest.raises(Refusal) as caught:
            wire.check_detokenize(pb.DetokenizeRequest(token_ids=ids), model)
        return field_of(caught.value)

    def test_bounds(self):
        assert self.refusal([]) == "token_ids"
        assert self.refusal([1, VOCAB]) == "token_ids[1]"
        assert self.refusal([1] * (MAX_LENGTH + 1)) == "token_ids"
        assert self.refusal([1], BARE) == "token_ids"
        assert wire.check_detokenize(pb.DetokenizeRequest(token_ids=[1] * MAX_LENGTH), MODEL) is MODEL.text
