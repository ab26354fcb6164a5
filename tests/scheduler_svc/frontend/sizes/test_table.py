"""The limits in the protos: each field of a request has one, and every check refuses what is beyond it."""

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from tandem.v1 import control_pb2, limits_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages import config, names, operators
from scheduler_svc.frontend import methods
from scheduler_svc.frontend.scan import Scan
from scheduler_svc.frontend.sizes import MAX_CHAR_BYTES, Check, Rule, Rules, Sizes, rules_of
from tandem_contract.limits import limit_at
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.failures import refused
from tests.scheduler_svc.frontend.fake_core import Service, model_state, service

METHODS = [method for service in (methods.INFERENCE, methods.CONTROL, methods.HEALTH) for method in service.methods]
SIZES = Sizes(prompt_tokens=511, text_chars=2560, length=512, top_k=274, samples=4, logprobs=5)
"""Those of the front end under test; max_length 512 and at most 5 characters a token."""
STATE = model_state()
STATE.chat_template = "{{ messages[0].content }}"
# Fields that have no limit of their own, besides flags and messages.
WITHOUT = {
    "GenerateRequest.sampling.seed": "every number is a seed",
    "GenerateRequest.stop.min_new_tokens": "at most the output tokens in force",
    "GenerateRequest.output.prompt_logprobs_start": "less than the tokens of the prompt",
}
# What the texts and the ids of a prompt, and a constraint, are refused with: each is counted as a whole.
COUNTED_TOGETHER = {
    "token_ids.ids": "prompt has 512 tokens; the limit is 511 (",
    "text": "text has 2561 characters; the limit is 2560",
    "chat.template_args_json": "chat has 2564 characters; the limit is 2560",
    "constraint.json_schema": "constraint has 65,541 bytes; the limit is 65536",
    "constraint.regex": "constraint has 65,541 bytes; the limit is 65536",
    "constraint.lark": "constraint has 65,541 bytes; the limit is 65536",
}


def fields(kind: Any, rules: Rules, bound: int = 0) -> Iterator[tuple[Any, Rule, int]]:
    """The descriptor of every field of a request, its rule, and the limit in bytes of a message around it."""
    for field in kind.fields:
        rule = rules.fields[field.number]
        yield field, rule, bound
        if rule.inside is not None:
            yield from fields(field.message_type, rule.inside, rule.bytes or bound)


def fields_of(method: Any) -> list[tuple[Any, Rule, int]]:
    return list(fields(method.input_type, rules_of(method.input_type)))


# Fields in the messages of lists. Only lists and texts are checked there, each counted over all messages.
LISTED = {
    inner.path
    for method in METHODS
    for _, rule, _ in fields_of(method)
    if rule.is_list and rule.inside is not None
    for inner in rule.inside.walk()
}


def test_every_field_of_a_request_has_a_limit_or_a_reason_to_have_none() -> None:
    without = {
        f"{method.input_type.name}.{rule.path}"
        for method in METHODS
        for field, rule, bound in fields_of(method)
        if field.type not in (field.TYPE_BOOL, field.TYPE_MESSAGE)
        and not (bound or rule.bytes or rule.chars)
        and rule.most is None
        and (rule.entries is None or field.type == field.TYPE_STRING)
    }
    assert without == WITHOUT.keys()


def test_no_limit_is_one_of_another_type() -> None:
    for method in METHODS:
        for field, rule, _ in fields_of(method):
            is_text, is_float = field.type == field.TYPE_STRING, field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE)
            assert is_text or not rule.chars, rule.path
            assert field.type in (field.TYPE_BYTES, field.TYPE_MESSAGE) or not rule.bytes, rule.path
            assert rule.most is None or is_float or not rule.has_bytes or rule.is_list, rule.path
            assert rule.path not in LISTED or rule.is_list or (rule.most is None and isinstance(rule.chars, str)), (
                rule.path
            )
            assert field.enum_type is None or [each.number for each in field.enum_type.values] == [
                *range(len(field.enum_type.values))
            ], rule.path
            # 0 stands for an unset number, which is never refused.
            assert field.has_presence or rule.is_list or (not rule.is_above and rule.least <= 0), rule.path


def test_what_the_service_knows_besides_agrees_with_the_limits() -> None:
    longest = limit_at(control_pb2.ListRequestsRequest, "tenant").chars + len(names.TENANT_END)
    longest += max(map(len, names.PREFIXES)) + limit_at(pb.GenerateRequest, "request_id").chars
    ids = (
        (pb.ResumeRequest, "request_id"),
        (control_pb2.AbortRequest, "request_ids"),
        (control_pb2.ListRequestsRequest, "id_prefix"),
    )
    assert {limit_at(*each).chars for each in ids} == {longest}
    # The core reads no protos; what it takes from a front end has bounds of its own.
    assert limit_at(pb.ResumeRequest, "offsets").entries == config.MAX_NUM_SAMPLES
    update = control_pb2.UpdateWeightsRequest
    assert limit_at(update, "version").chars == operators.MAX_VERSION_CHARS
    assert limit_at(update, "folder").chars == operators.MAX_FOLDER_CHARS
    assert limit_at(control_pb2.DrainRequest, "worker").chars == operators.MAX_WORKER_NAME_CHARS
    assert limit_at(control_pb2.ListRequestsRequest, "page_size").most == operators.MAX_PAGE_SIZE
    assert limit_at(pb.GenerateRequest, "stop.max_new_tokens").most == 2**31 - 1
    # RequestLimits has one number for these.
    lists = {
        limit_at(pb.SamplingParams, name).entries for name in ("logit_bias", "allowed_token_ids", "banned_token_ids")
    }
    assert len(lists) == 1
    # One check for all.
    kinds = pb.GenerateRequest, pb.TokenizeRequest, pb.DetokenizeRequest, pb.RenderChatRequest
    assert len({limit_at(kind, "model").chars for kind in kinds}) == 1
    times = {limit_at(kind, "max_seconds").most for kind in (control_pb2.DrainRequest, update)}
    assert times == {operators.MAX_OPERATION_SECONDS}


def made(method: Any, rule: Rule, value: Any) -> Any:
    """A request that has this value, and besides what it needs to be accepted."""
    message: Any = message_factory.GetMessageClass(method.input_type)()
    if method.name in ("Generate", "Tokenize"):
        message.text = "the"
    if method.name == "Detokenize":
        message.token_ids.append(1)
    if method.name == "Resume":
        message.request_id, message.resume_secret = "r", b"s"
    if rule.path == "token_ids.ids":
        message.ClearField("text")
    if method.name == "RenderChat" or rule.path.startswith("chat."):
        message.chat.messages.add(role="user", content=["the"])
    *above, name = rule.path.split(".")
    owner = functools.reduce(getattr, above, message)
    if isinstance(value, dict):
        getattr(owner, name).update(value)
    elif isinstance(value, list):
        owner.ClearField(name)
        getattr(owner, name).extend(value)
    else:
        setattr(owner, name, value)
    return message


def edges(field: Any, rule: Rule, bound: int) -> Iterator[tuple[Any, Any, str]]:
    """A value at a limit of the field, one just beyond it, and what the second is refused with, behind `path is`."""
    entries, chars = SIZES.number(rule.entries), SIZES.number(rule.chars)
    if rule.is_list:
        words = f"{entries + 1} long; the limit is {entries}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield dict.fromkeys(range(entries), 1.0), dict.fromkeys(range(entries + 1), 1.0), words
            return
        message = message_factory.GetMessageClass(field.message_type)() if field.message_type is not None else None
        one = "x" if field.type == field.TYPE_STRING else 1 if message is None else message
        yield [one] * entries, [one] * (entries + 1), words
        if isinstance(rule.chars, int):
            yield ["é" * chars], ["é" * (chars + 1)], f"{chars + 1} characters long; the limit is {chars}"
    elif field.type == field.TYPE_STRING:
        most = chars or bound
        yield "x" * (most - 5 * (not chars)), "x" * (most + 1), f"{most + 1} characters long; the limit is {most}"
    elif field.type == field.TYPE_BYTES:
        yield b"x" * rule.bytes, b"x" * (rule.bytes + 1), f"{rule.bytes + 1} bytes long; the limit is {rule.bytes}"
    elif rule.most is not None:
        low, high = rule.least, SIZES.number(rule.most)
        words = (
            f"; it must be above {low:g}, and at most {high}"
            if rule.is_above
            else f"; it must be between {low:.7g} and {high}"
        )
        if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
            kind: Any = np.float32 if field.type == field.TYPE_FLOAT else np.float64
            under, over = (float(np.nextafter(kind(at), kind(to))) for at, to in ((low, -np.inf), (high, np.inf)))
            least = float(np.nextafter(kind(low), kind(np.inf))) if rule.is_above else low
            outside = [low if rule.is_above else under, over, float("inf"), float("-inf"), float("nan")]
            yield from ((least if value == outside[0] else high, value, words) for value in outside)
        else:
            smallest = 0 if field.type in (field.TYPE_UINT32, field.TYPE_UINT64) else -(2**31)
            yield from ((low, low - 1, words) for _ in range(low - 1 >= smallest))
            yield high, high + 1, words


CASES = [
    pytest.param(method, rule, *edge, id=f"{method.name}-{rule.path}-{number}")
    for method in METHODS
    for field, rule, bound in fields_of(method)
    if rule.path not in LISTED
    for number, edge in enumerate(edges(field, rule, bound))
]


@pytest.mark.parametrize(("method", "rule", "within", "beyond", "words"), CASES)
def test_a_value_at_a_limit_passes_and_one_beyond_not(
    method: Any, rule: Rule, within: Any, beyond: Any, words: str
) -> None:
    check = Check(message_factory.GetMessageClass(method.input_type))
    scan = Scan(method.input_type)
    good = made(method, rule, within)
    check(good, SIZES)
    scan.check(good.SerializeToString(), SIZES)
    bad = made(method, rule, beyond)
    if rule.path in COUNTED_TOGETHER and rule.path != "token_ids.ids":
        check(bad, SIZES)
        return
    why = refused(check, bad, SIZES).message
    entry = "[0]" if "characters long" in words and rule.is_list else ""
    assert why.startswith(f"{rule.path}{entry} is ") and why.endswith(words)


def test_the_scan_refuses_what_a_limit_cannot_hold() -> None:
    """Texts, bytes and lists that are too long for their limit in any encoding."""
    for method in METHODS:
        for field, rule, bound in fields_of(method):
            if field.type not in (field.TYPE_STRING, field.TYPE_BYTES) or rule.path in LISTED:
                continue
            most = rule.bytes or bound or MAX_CHAR_BYTES * SIZES.number(rule.chars)
            value: Any = b"x" * (most + 1) if field.type == field.TYPE_BYTES else "x" * (most + 1)
            data = made(method, rule, [value] if rule.is_list else value).SerializeToString()
            why = refused(Scan(method.input_type).check, data, SIZES).message
            assert why.startswith(rule.path if not bound else "constraint has")


async def test_a_front_end_refuses_what_is_beyond_each_limit(tmp_path: Path) -> None:
    """Requests of all methods with one field just beyond its limit; the core gets none of them."""
    async with service(tmp_path, state=STATE) as s:
        for case in CASES:
            method, rule, _, beyond, words = cast(Any, case.values)
            full = f"/{method.containing_service.full_name}/{method.name}"
            data = made(method, rule, beyond).SerializeToString()
            call = cast(Any, s.channel.stream_stream)(full)(iter([data]), timeout=TIMEOUT_SECONDS)
            status, details = await call.code(), await call.details()
            assert status == grpc.StatusCode.INVALID_ARGUMENT, (full, rule.path, details)
            if rule.path in COUNTED_TOGETHER:
                assert details.startswith(COUNTED_TOGETHER[rule.path]), (full, rule.path, details)
                continue
            # A message of more than 4 KiB is refused by the scan.
            assert rule.path in details, (full, rule.path, details)
            limit = words.rpartition("; ")[2]
            shown = details.replace(",", "")
            assert shown.endswith(limit.replace(",", "")) or f"between 1 and {rule.entries}" in shown, (full, details)
        assert await s.core.is_silent()
    assert len(CASES) > 90


async def test_the_model_info_tells_the_limits(s: Service) -> None:
    info = await s.model_info()
    told = info.limits
    every = {field.name: field.GetOptions().Extensions[limits_pb2.tells] for field in told.DESCRIPTOR.fields}
    # Those of the server's settings, and the caller's own.
    assert {name for name, tells in every.items() if not tells} == {
        *("max_message_bytes", "max_metadata_bytes", "max_new_tokens"),
    }
    assert {field.name for field, value in told.ListFields() if value} == every.keys() - {"max_new_tokens"}
    assert told.max_message_bytes == 1 << 20
    assert (told.max_prompt_tokens, told.max_text_chars) == (SIZES.prompt_tokens, SIZES.text_chars)
    assert (told.min_priority, told.max_priority) == (-1000, 1000)
    assert (told.max_stop_strings, told.max_stop_string_chars, told.max_stop_token_ids) == (16, 256, 256)
    assert (told.max_salt_chars, told.max_request_id_chars, told.max_listed_tokens) == (256, 128, 4096)
    assert (told.max_time_seconds, told.max_linger_seconds, told.max_queue_seconds) == (604_800, 600, 86_400)
    assert (told.max_chat_messages, told.max_chat_tools, told.max_abort_ids) == (1024, 128, 1024)
    # A request at these limits is admitted.
    stop = pb.StopParams(
        stop_strings=[f"{i:02}".ljust(told.max_stop_string_chars, "x") for i in range(told.max_stop_strings)],
        stop_token_ids=[7] * told.max_stop_token_ids,
        max_time_seconds=told.max_time_seconds,
    )
    sampling = pb.SamplingParams(
        allowed_token_ids=pb.TokenIds(ids=[1] * told.max_listed_tokens),
        banned_token_ids=[2] * told.max_listed_tokens,
        logit_bias=dict.fromkeys(range(274), 1.0),
    )
    call = s.generate(
        token_ids=pb.TokenIds(ids=[273] * told.max_prompt_tokens),
        stop=stop,
        sampling=sampling,
        priority=told.max_priority,
        request_id="x" * told.max_request_id_chars,
        cache=pb.CacheParams(salt="é" * told.max_salt_chars),
        resume=pb.ResumeParams(linger_seconds=told.max_linger_seconds),
    )
    waiting = asyncio.ensure_future(s.core.admit())
    await asyncio.wait([waiting, asyncio.ensure_future(call.read())], return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), await call.details()
    submit = waiting.result()
    assert len(submit.prompt) == 4 * told.max_prompt_tokens
