"""What a request may be besides the limits of its fields, and the Submit made of it. No server, no sockets.

`sizes/test_table.py` has every field at and beyond its limit.
"""

import asyncio
import functools
import hashlib
import math
from itertools import product
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages import page_hash
from scheduler_svc.core.messages.events import MAX_SAMPLING_BYTES
from scheduler_svc.door.tenant import EVERYONE, CallerLimits
from scheduler_svc.frontend import model as models
from scheduler_svc.frontend import validate as wire
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.prompt import read_prompt
from scheduler_svc.frontend.rpc import calls
from scheduler_svc.frontend.rpc.status import Refusal
from tandem_contract.limits import limit_at
from tests.scheduler_svc.frontend.failures import field_of, refused
from tests.scheduler_svc.frontend.fake_core import CACHE_ROOT, model_state
from tests.scheduler_svc.frontend.sizes.test_scan import field
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, EOS

LISTED = limit_at(pb.SamplingParams, "banned_token_ids").entries
MODEL = models.load(model_state())
BARE = models.load(model_state(has_tokenizer=False))
VOCAB = MODEL.info.vocab_size
MAX_LENGTH = MODEL.info.max_length
EOS_ID = MODEL.tokenizer.backend.token_to_id(EOS)
# Values of a float32 next to 0.01 and 100.
BELOW_A_HUNDREDTH = float(np.nextafter(np.float32(0.01), np.float32(0)))
ABOVE_100 = float(np.nextafter(np.float32(100), np.float32(200)))


def submit(served: Model = MODEL, **fields: Any) -> frontend_pb2.Submit:
    """The Submit of a request with these fields. Raises Refusal."""
    if "text" not in fields and "token_ids" not in fields:
        fields["token_ids"] = pb.TokenIds(ids=[1, 2, 3])
    return submit_message(pb.GenerateRequest(**fields), served)


def submit_bytes(data: bytes) -> frontend_pb2.Submit:
    """The Submit of a serialized request. Raises Refusal."""
    return submit_message(calls.parse(pb.GenerateRequest, data))


def submit_message(request: pb.GenerateRequest, model: Model = MODEL) -> frontend_pb2.Submit:
    checked = wire.check_request(request, model, EVERYONE.limits)

    async def made() -> frontend_pb2.Submit:
        prompt = await read_prompt(request, model, "")
        return await wire.make_submit(checked, prompt.token_ids, model, EVERYONE, deadline_seconds=1.5)

    return asyncio.run(made())


def refusal(**fields: Any) -> Refusal:
    return refused(submit, **fields)


KINDS = {"sampling": pb.SamplingParams, "stop": pb.StopParams, "output": pb.OutputParams, "cache": pb.CacheParams}


def params(name: str, **fields: Any) -> dict[str, Any]:
    return {name: KINDS[name](**fields)}


sampling, stop, output, cache = (functools.partial(params, name) for name in KINDS)


def allowed(*ids: int) -> dict[str, Any]:
    return {"allowed_token_ids": pb.TokenIds(ids=ids)}


def prompt(*ids: int) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=ids)}


LINGERS = {"resume": pb.ResumeParams(linger_seconds=5.0)}
REFUSED = [
    # The field, the request, and the parts of the message besides the field.
    ("sampling.temperature", sampling(temperature=ABOVE_100), ["100.0000076", "100"]),
    ("sampling.temperature", sampling(temperature=math.nan), ["nan", "100"]),
    ("sampling.typical_p", sampling(typical_p=0), ["is 0.0", "above 0, and at most 1"]),
    ("sampling.presence_penalty", sampling(presence_penalty=-2.5), ["is -2.5", "between -2 and 2"]),
    ("sampling.repetition_penalty", sampling(repetition_penalty=0), ["is 0.0", "between 0.01 and 100"]),
    ("sampling.repetition_penalty", sampling(repetition_penalty=BELOW_A_HUNDREDTH), ["is 0.00999999", "0.01 and 100"]),
    ("sampling.logit_bias[3]", sampling(logit_bias={1: 0.0, 3: 100.5}), ["is 100.5", "between -100 and 100"]),
    ("sampling.logit_bias[0]", sampling(logit_bias={0: -math.inf}), ["is -inf", "between -100 and 100"]),
    ("sampling.logit_bias[0]", sampling(logit_bias={0: math.nan}), ["is nan", "between -100 and 100"]),
    (f"sampling.logit_bias[{VOCAB}]", sampling(logit_bias={VOCAB: 1.0}), [f"for token {VOCAB}", f"has {VOCAB} tokens"]),
    ("sampling.allowed_token_ids.ids", sampling(**allowed()), ["empty", "1 token"]),
    ("sampling.allowed_token_ids.ids[1]", sampling(**allowed(0, VOCAB)), [VOCAB]),
    ("sampling.banned_token_ids[0]", sampling(banned_token_ids=[VOCAB]), [VOCAB]),
    ("sampling.banned_token_ids", sampling(banned_token_ids=range(VOCAB)), [f"has {VOCAB} tokens", "bans them all"]),
    (
        "sampling.allowed_token_ids",
        sampling(**allowed(1, 1, 2), banned_token_ids=[2, 3, 1]),
        ["has 2 tokens, and sampling.banned_token_ids bans them all; 1 must remain"],
    ),
    ("output.logprob_pieces", output(logprob_pieces=True), ["is true", "neither output.logprobs nor"]),
    ("output.prompt_logprobs_start", output(prompt_logprobs_start=3), ["is 3", "limit is 2 (the prompt has 3 tokens)"]),
    ("output.prompt_logprobs_start", output(prompt_logprobs_start=2**32 - 1), [2**32 - 1, "limit is 2"]),
    ("resume.linger_seconds", LINGERS | output(logprobs=0), ["is 5", "output.logprobs is set"]),
    ("resume.linger_seconds", LINGERS | output(prompt_logprobs_start=1), ["output.prompt_logprobs_start is set"]),
    ("stop.min_new_tokens", stop(max_new_tokens=5, min_new_tokens=6), [6, 5]),
    (
        "stop.min_new_tokens",
        stop(max_new_tokens=2**31 - 1, min_new_tokens=MAX_LENGTH - 2),
        [MAX_LENGTH - 2, f"here {MAX_LENGTH - 3}"],
    ),
    ("stop.min_new_tokens", stop(min_new_tokens=101), [101, 100]),
    ("stop.min_new_tokens", stop(min_new_tokens=2**31), [2**31, 100]),
    ("stop.stop_token_ids[1]", stop(stop_token_ids=[0, VOCAB]), [VOCAB]),
    ("stop.stop_token_ids[0]", stop(stop_token_ids=[2**32 - 1]), [2**32 - 1, VOCAB]),
    ("stop.stop_strings[1]", stop(stop_strings=["a", ""]), ["empty"]),
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
def test_a_refusal_names_the_field_the_number_and_the_limit(field: str, fields: dict[str, Any], said: list[object]):
    found = refusal(**fields)
    assert (field_of(found), found.retry_after_seconds) == (field, None)
    for word in [field, *said]:
        assert str(word) in found.message


ACCEPTED = [
    sampling(top_p=float(np.nextafter(np.float32(0), np.float32(1)))),
    sampling(top_k=VOCAB),
    sampling(seed=0),
    sampling(seed=2**64 - 1),
    sampling(repetition_penalty=0.01),
    sampling(logit_bias={0: -100.0, VOCAB - 1: 100.0}),
    sampling(**allowed(VOCAB - 1)),
    sampling(**allowed(*[1] * 4096)),
    sampling(banned_token_ids=range(1, VOCAB)),
    sampling(banned_token_ids=[1] * 4096),
    sampling(**allowed(1, 2), banned_token_ids=[1]),
    # One that may be drawn before the stop tokens may.
    {**sampling(**allowed(1, 2, EOS_ID)), **stop(min_new_tokens=1, stop_token_ids=[1])},
    # One that may not, where it need not.
    {**sampling(**allowed(EOS_ID)), **stop(min_new_tokens=0)},
    {**sampling(**allowed(EOS_ID)), **stop(min_new_tokens=1, ignore_eos=True)},
    output(prompt_logprobs_start=0),
    output(prompt_logprobs_start=2),
    stop(max_new_tokens=MAX_LENGTH - 3),
    stop(max_new_tokens=2**31 - 1, min_new_tokens=MAX_LENGTH - 3),
    stop(max_new_tokens=5, min_new_tokens=5),
    stop(min_new_tokens=0),
    stop(max_time_seconds=1e-9),
    stop(stop_token_ids=[0, VOCAB - 1]),
    {"model": "toy"},
    prompt(0, VOCAB - 1),
    prompt(*[1] * (MAX_LENGTH - 1)),
    {"text": "a" * (MAX_LENGTH - 1)},
    {"text": "\0"},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda value: str(value)[:40])
def test_values_at_their_limits_are_accepted(fields: dict[str, Any]):
    assert submit(**fields).max_new_tokens


@pytest.mark.parametrize(
    ("field", "fields", "many"),
    [
        ("sampling.allowed_token_ids", sampling(**allowed(5, EOS_ID)), "sampling.allowed_token_ids has 2 tokens"),
        ("sampling.allowed_token_ids", sampling(**allowed(4, 5), banned_token_ids=[4]), "_token_ids has 2 tokens"),
        (
            "sampling.banned_token_ids",
            sampling(banned_token_ids=set(range(VOCAB)) - {5, EOS_ID}),
            f"the vocabulary has {VOCAB} tokens",
        ),
    ],
)
def test_a_request_without_a_token_before_min_new_tokens_is_refused(field: str, fields: dict[str, Any], many: str):
    found = refusal(**fields, **stop(min_new_tokens=1, stop_token_ids=[5]))
    assert field_of(found) == field
    why = "before stop.min_new_tokens, until which end-of-sequence and stop tokens are banned; 1 must remain"
    assert found.message.endswith(f"{many}, and none of them may be sampled {why}")
    assert submit(**fields, **stop(stop_token_ids=[5])).max_new_tokens


def params_of(made: frontend_pb2.Submit) -> pb.SamplingParams:
    """What the worker would get."""
    return pb.SamplingParams.FromString(made.sampling)


def test_a_request_that_sets_nothing_has_the_models_defaults_and_every_parameter():
    made = submit()
    params = params_of(made)
    # A later one is set only if it changes something.
    first = {field.name for field in params.DESCRIPTOR.fields if field.number <= 13}
    unset = first - {field.name for field, _ in params.ListFields()}
    assert unset == {"logit_bias", "allowed_token_ids", "banned_token_ids"}
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, np.float32(0.9), 40, 0.125)
    assert params.repetition_penalty == 1.25
    assert (params.presence_penalty, params.frequency_penalty, params.typical_p, params.num_samples) == (0, 0, 1, 1)
    assert (made.num_samples, made.num_logprobs, made.prompt_logprobs_from) == (1, 0, 0)
    assert (made.max_new_tokens, made.min_new_tokens, made.ignore_eos, made.priority) == (100, 0, False, 0)
    assert (made.max_time_seconds, made.deadline_seconds) == (0.0, 1.5)


def test_a_parameter_that_older_workers_do_not_know_is_sent_if_it_changes_something(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "_LATER_FIELDS", {"typical_p": 1.0})
    assert not params_of(submit()).HasField("typical_p")
    assert not params_of(submit(**sampling(typical_p=1))).HasField("typical_p")
    assert params_of(submit(**sampling(typical_p=0.5))).typical_p == 0.5


def test_what_a_request_sets_is_sent_to_the_core_except_biases_of_zero():
    asked = {
        "presence_penalty": -0.5, "frequency_penalty": 1.5, "repetition_penalty": 1.75, "num_samples": 3,
        "banned_token_ids": [7, 8, 7], **allowed(9, 4, 9),
    }  # fmt: skip
    made = submit(**sampling(**asked, logit_bias={9: -2.5, 4: 1.5, 7: 3.0, 5: 0.0}))
    params = params_of(made)
    assert dict(params.logit_bias) == {9: -2.5, 4: 1.5, 7: 3.0}
    assert {name: getattr(params, name) for name in asked} == asked | allowed(9, 4, 9)
    assert made.num_samples == 3


def test_equal_requests_are_encoded_to_equal_bytes():
    ids = list(range(200))
    made = [submit(**sampling(seed=1, logit_bias=dict.fromkeys(order, 1.0))).sampling for order in (ids, ids[::-1])]
    assert made[0] == made[1]


def test_the_largest_sampling_fits_the_core():
    largest = 2**32 - 1
    params = pb.SamplingParams()
    params.CopyFrom(params_of(submit()))
    params.seed, params.top_k = 2**64 - 1, largest
    params.logit_bias.update({largest - i: 100.0 for i in range(LISTED)})
    params.allowed_token_ids.ids.extend([largest] * LISTED)
    params.banned_token_ids.extend([largest] * LISTED)
    assert params.ByteSize() <= MAX_SAMPLING_BYTES


@pytest.mark.parametrize(("num_top", "num_logprobs"), [(0, 1), (5, 6)])
def test_num_logprobs_is_one_more_than_the_requested_alternatives(num_top: int, num_logprobs: int):
    assert submit(**output(logprobs=num_top)).num_logprobs == num_logprobs


@pytest.mark.parametrize(
    ("num_prompt", "start", "first"),
    # The first token of a prompt has no logprob; a prompt of one token gives none at all.
    [(3, 0, 1), (3, 1, 1), (3, 2, 2), (1, 0, 0)],
)
def test_prompt_logprobs_start_at_the_second_token_or_later(num_prompt: int, start: int, first: int):
    made = submit(**prompt(*[1] * num_prompt), **output(prompt_logprobs_start=start))
    assert (made.prompt_logprobs_from, made.num_logprobs) == (first, 0)


def test_a_request_without_a_prompt_is_refused():
    assert field_of(refused(submit_message, pb.GenerateRequest())) == "prompt"


def test_another_model_is_not_found():
    found = refusal(model="other")
    assert found.code is grpc.StatusCode.NOT_FOUND
    assert "'other'" in found.message and "'toy'" in found.message
    [resource] = found.details
    assert isinstance(resource, error_details_pb2.ResourceInfo) and resource.resource_name == "other"


@pytest.mark.parametrize("temperature", [None, 0, 0.5, 100])
@pytest.mark.parametrize("top_p", [0, -0.0, 1e-60])
def test_top_p_0_is_greedy(top_p: float, temperature: float | None) -> None:
    made = params_of(submit(**sampling(top_p=top_p, temperature=temperature, seed=1)))
    assert made == params_of(submit(**sampling(top_p=1, temperature=0, seed=1)))


def test_a_default_top_p_of_0_is_greedy() -> None:
    state = model_state()
    state.info.sampling_defaults.top_p = 0
    model = models.load(state)
    assert params_of(submit(model)).temperature == 0
    assert params_of(submit(model, **sampling(top_p=0.5))).temperature == 0.5


def test_a_default_top_k_beyond_the_vocabulary_is_accepted():
    state = model_state()
    state.info.sampling_defaults.top_k = VOCAB + 5
    model = models.load(state)
    assert params_of(submit(model)).top_k == VOCAB + 5
    assert params_of(submit(model, **sampling(top_k=VOCAB))).top_k == VOCAB


def test_fields_set_to_zero_win_over_defaults():
    made = params_of(submit(**sampling(temperature=0, top_k=0, min_p=0, seed=0)))
    assert (made.temperature, made.top_k, made.min_p, made.seed) == (0.0, 0, 0.0, 0)


def test_unset_seeds_differ():
    assert len({params_of(submit()).seed for _ in range(20)}) == 20


def test_unset_max_new_tokens_is_the_number_that_fits():
    assert submit(**prompt(*[1] * (MAX_LENGTH - 5))).max_new_tokens == 5


@pytest.mark.parametrize("asked", [MAX_LENGTH - 3, MAX_LENGTH - 2, MAX_LENGTH, 2**31 - 1])
def test_max_new_tokens_beyond_the_models_length_is_sent_to_the_core(asked: int):
    """The Submit shows whether more tokens were requested than fit; the number in force is the number that fits."""
    made = submit(**stop(max_new_tokens=asked))
    assert made.max_new_tokens == min(asked, MAX_LENGTH)
    assert (made.max_new_tokens > MAX_LENGTH - 3) == (asked > MAX_LENGTH - 3)
    assert wire.new_tokens_in_force(made.max_new_tokens, 3, MODEL) == MAX_LENGTH - 3


def test_pages_are_hashed_as_the_core_hashes_them():
    ids = [token % VOCAB for token in range(5 * MODEL.info.page_size - 1)]
    made = submit(**prompt(*ids))
    chain = made.prefix_root
    for page in range(4):
        tokens = np.array(ids[16 * page : 16 * page + 16], "<i4").tobytes()
        chain = hashlib.sha256(chain + tokens).digest()
        assert made.page_hashes[32 * page : 32 * page + 32] == chain
    assert len(made.page_hashes) == 4 * 32
    assert (made.bypass_read, made.bypass_write) == (False, False)


@pytest.mark.parametrize("num_tokens", [15, 16, 95, 96, 97, 191, 192, 193, 480])
def test_other_tasks_run_while_a_long_prompt_is_hashed(num_tokens: int, monkeypatch: pytest.MonkeyPatch):
    """The chain of hashes is the same if the prompt is hashed in parts."""
    ids = prompt(*[token % VOCAB for token in range(num_tokens)])
    whole = submit(**ids).page_hashes
    monkeypatch.setattr(wire, "PAGES_AT_ONCE", 6)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def made() -> bytes:
        request = pb.GenerateRequest(**ids)
        checked = wire.check_request(request, MODEL, EVERYONE.limits)
        counting = asyncio.create_task(others())
        message = await wire.make_submit(checked, request.token_ids.ids, MODEL, EVERYONE, deadline_seconds=0)
        counting.cancel()
        return message.page_hashes

    assert asyncio.run(made()) == whole
    assert turns == (num_tokens - 1) // 96


@pytest.mark.parametrize("salt", ["x" * 256, "\U0001f6b2" * 256, "e\u0301" * 128, "\uffff" * 256, "\0" * 256])
def test_each_salt_of_256_characters_has_its_own_root(salt: str):
    ids = prompt(*[1] * 16)
    parsed = pb.GenerateRequest.FromString(pb.GenerateRequest(**ids, **cache(salt=salt)).SerializeToString())
    made = [submit_message(parsed), *(submit(**ids, **cache(salt=other)) for other in (salt[:-1], "\u00e9" * 128, ""))]
    assert len({one.prefix_root for one in made}) == 4


def test_hashes_depend_on_the_root_and_the_salt():
    ids = prompt(*[1] * 16)
    other_root = model_state()
    other_root.cache_root = bytes(32)
    made = [
        submit(**ids),
        submit(**ids, **cache(salt="")),
        submit(**ids, **cache(salt="a")),
        submit(**ids, **cache(salt="b")),
        submit(models.load(other_root), **ids),
    ]
    assert len({one.prefix_root for one in made}) == len({one.page_hashes for one in made}) == 4
    assert made[0].prefix_root == made[1].prefix_root == page_hash.prefix_root(CACHE_ROOT, "")
    # Another split of the same bytes into root and salt gives another root.
    assert page_hash.prefix_root(b"ab", "c") != page_hash.prefix_root(b"a", "bc")


@pytest.mark.parametrize(("read", "write"), [(True, False), (False, True), (True, True)])
def test_cache_bypasses_are_sent_and_change_no_hash(read: bool, write: bool):
    ids = prompt(*[1] * 16)
    made = submit(**ids, **cache(bypass_read=read, bypass_write=write))
    assert (made.bypass_read, made.bypass_write) == (read, write)
    assert made.page_hashes == submit(**ids).page_hashes


def test_the_cache_root_is_not_in_the_models_repr():
    assert str(CACHE_ROOT) not in repr(MODEL)
    assert CACHE_ROOT.hex() not in repr(MODEL)


def test_request_ids_are_kept_or_assigned():
    assert submit(request_id="mine").request_id == "mine"
    assert submit().request_id != submit().request_id != ""


def test_arrays_are_little_endian_int32():
    made = submit(**prompt(1, 2, VOCAB - 1), **stop(stop_token_ids=[5, 5, 6]))
    assert np.frombuffer(made.prompt, "<i4").tolist() == [1, 2, VOCAB - 1]
    assert np.frombuffer(made.stop_token_ids, "<i4").tolist() == [5, 6]


def test_special_tokens_in_a_text_are_encoded_to_their_ids():
    made = submit(text=f"{BOS}the")
    assert np.frombuffer(made.prompt, "<i4").tolist() == [MODEL.tokenizer.backend.token_to_id(BOS), 258]


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


def test_token_ids_need_no_tokenizer():
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
    assert wire.check_request(request, BARE, EVERYONE.limits).want_text is False
    assert wire.check_request(request, MODEL, EVERYONE.limits).want_text is True


# Field 1000, a varint.
UNKNOWN = b"\xc0\x3e\x05"


FIELDS = pb.GenerateRequest.DESCRIPTOR.fields_by_name
SAMPLING = FIELDS["sampling"].number
LOGIT_BIAS = pb.SamplingParams.DESCRIPTOR.fields_by_name["logit_bias"].number
WITH_UNKNOWN = {
    "GenerateRequest.1000": pb.GenerateRequest(text="a").SerializeToString() + UNKNOWN,
    # The entry of a map is named by its map.
    f"SamplingParams.{LOGIT_BIAS}": field(SAMPLING, field(LOGIT_BIAS, b"\x08\x05" + UNKNOWN)),
} | {
    f"{FIELDS[inner].message_type.name}.1000": field(FIELDS[inner].number, UNKNOWN)
    for inner in ("token_ids", "sampling", "stop", "output", "cache")
}


@pytest.mark.parametrize("named", WITH_UNKNOWN)
def test_an_unknown_field_is_named(named: str):
    found = refused(submit_bytes, WITH_UNKNOWN[named])
    assert field_of(found) == named
    assert f"field number {named.split('.')[1]}" in found.message


@pytest.mark.parametrize(
    "hostile",
    [
        UNKNOWN * 30_000,
        field(SAMPLING, UNKNOWN * 30_000),
        field(SAMPLING, field(LOGIT_BIAS, b"\x08\x05" + UNKNOWN) * 12_000),
    ],
    ids=["top level", "nested message", "map"],
)
def test_unknown_fields_of_large_messages_create_no_objects(monkeypatch: pytest.MonkeyPatch, hostile: bytes):
    made: list[object] = []
    monkeypatch.setattr(calls, "UnknownFieldSet", made.append)
    assert len(hostile) > calls.MAX_SMALL_BYTES
    found = refused(submit_bytes, hostile)
    assert field_of(found) == "GenerateRequest"
    # The headers of the outer fields are known.
    num_unknown = int(found.message.split()[2].replace(",", ""))
    assert len(hostile) - 8 <= num_unknown <= len(hostile)
    assert made == []


def test_fields_in_another_order_or_encoding_are_accepted():
    ids = pb.TokenIds(ids=[300]).SerializeToString()
    # One id at a time, twice; a field that is there twice; the last field first.
    loose = field(SAMPLING, b"") + field(4, b"\x08\xac\x02\x08\x01") + field(4, ids) + field(2, b"x") + field(2, b"toy")
    assert list(calls.parse(pb.GenerateRequest, loose).token_ids.ids) == [300, 1, 300]


numbers = st.sampled_from([0, 1, 5, VOCAB - 1, VOCAB, MAX_LENGTH, 2**31 - 1, 2**31, 2**32 - 1])
floats = st.floats(width=32) | st.sampled_from([0.0, 1.0, 100.0])
token_ids = st.lists(numbers, max_size=3)
requests = st.builds(
    pb.GenerateRequest,
    request_id=st.text(max_size=3),
    model=st.sampled_from(["", "toy", "other"]),
    token_ids=st.builds(pb.TokenIds, ids=st.lists(numbers, max_size=3)),
    sampling=st.builds(
        pb.SamplingParams,
        **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), floats),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), floats),
        top_k=numbers,
        num_samples=numbers,
        logit_bias=st.dictionaries(numbers, floats, max_size=2),
        allowed_token_ids=st.none() | st.builds(pb.TokenIds, ids=token_ids),
        banned_token_ids=token_ids,
    ),
    output=st.builds(pb.OutputParams, logprobs=st.none() | numbers, prompt_logprobs_start=st.none() | numbers),
    stop=st.builds(
        pb.StopParams,
        max_new_tokens=numbers,
        min_new_tokens=numbers,
        stop_strings=st.lists(st.text(max_size=2), max_size=2),
        stop_token_ids=st.lists(numbers, max_size=2),
        max_time_seconds=st.floats(),
    ),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache=st.none() | st.builds(pb.CacheParams, salt=st.text(max_size=300)),
)


@given(requests | st.binary(max_size=40))
def test_every_message_is_accepted_or_refused(sent: pb.GenerateRequest | bytes):
    made, refused = None, None
    try:
        made = submit_bytes(sent) if isinstance(sent, bytes) else submit_message(sent)
    except Refusal as error:
        refused = error
    if made is None:
        assert refused.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert len(refused.message) < 300
        return
    params = params_of(made)
    assert 1 <= made.max_new_tokens <= MAX_LENGTH and 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1 and 0 <= params.min_p <= 1


@pytest.mark.parametrize(
    ("ids", "model", "field"),
    [
        ([], MODEL, "token_ids"),
        ([1, VOCAB], MODEL, "token_ids[1]"),
        ([1] * (MAX_LENGTH + 1), MODEL, "token_ids"),
        ([1], BARE, "token_ids"),
    ],
    ids=["none", "id", "length", "tokenizer"],
)
def test_ids_out_of_bounds_are_refused(ids: list[int], model: Model, field: str):
    assert field_of(refused(wire.check_detokenize, pb.DetokenizeRequest(token_ids=ids), model)) == field
    assert wire.check_detokenize(pb.DetokenizeRequest(token_ids=[1] * MAX_LENGTH), MODEL) is MODEL.tokenizer


@pytest.mark.parametrize("default", [None, 100, 1 << 30])
@pytest.mark.parametrize("pages_hold", [0, 257, 1 << 20])
def test_a_maximum_is_the_callers_or_the_least_of_room_default_and_limit(default: int | None, pages_hold: int) -> None:
    state = model_state(max_length=MAX_LENGTH)
    state.longest_sequence = pages_hold
    state.info.ClearField("default_max_new_tokens")
    if default is not None:
        state.info.default_max_new_tokens = default
    model = models.load(state)
    for own, num_prompt in product((None, 50, (1 << 30) - 1), (1, 200, 256, 257, 511)):
        limits = CallerLimits(max_new_tokens=own)
        longest = pages_hold if pages_hold == 257 and num_prompt < 257 else MAX_LENGTH
        least = min(longest - num_prompt, *(each for each in (default, own) if each is not None), 1 << 30)
        assert wire.maximum_of(pb.StopParams(), num_prompt, model, limits) == (least, False), (own, num_prompt)
        for asked in (1, 40, MAX_LENGTH + 1):
            found = wire.maximum_of(pb.StopParams(max_new_tokens=asked), num_prompt, model, limits)
            assert found == (min(asked, MAX_LENGTH), True), (own, num_prompt, asked)
