"""The table of limits against the descriptors of every method, and each of its limits against a front end."""

import asyncio
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from tandem.v1 import control_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend import methods
from scheduler_svc.frontend.sizes import LIMITS, Limit, Of, Sizes
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.fake_core import Service, model_state

Run = Callable[..., None]
METHODS = [method for service in (methods.INFERENCE, methods.CONTROL, methods.HEALTH) for method in service.methods]
SIZES = Sizes(prompt_tokens=511, text_chars=2560, length=512, vocabulary=274, samples=4, logprobs=5)
"""Of the front end under test; max_length 512 and at most 5 characters a token."""
STATE = model_state()
STATE.chat_template = "{{ messages[0].content }}"


LISTS_WITH_FIELDS = ("chat.messages", "chat.messages.tool_calls")


def paths(descriptor: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The path of every field of a request, with its descriptor, except inside lists of bounded entries."""
    for field in descriptor.fields:
        path = above + field.name
        yield path, field
        if field.message_type is not None and (not field.is_repeated or path in LISTS_WITH_FIELDS):
            yield from paths(field.message_type, f"{path}.")


def test_every_field_of_every_request_has_a_limit() -> None:
    found = {method.input_type.full_name: {path for path, _ in paths(method.input_type)} for method in METHODS}
    assert found == {name: set(limits) for name, limits in LIMITS.items()}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_each_limit_fits_the_type_of_its_field(method: Any) -> None:
    for path, field in paths(method.input_type):
        limit = LIMITS[method.input_type.full_name][path]
        if field.is_repeated:
            assert limit.of == Of.ENTRIES, path
            is_number = field.message_type is None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES)
            assert (limit.each_bytes == 0) == (is_number or path in LISTS_WITH_FIELDS), path
            if field.message_type is not None and path not in LISTS_WITH_FIELDS:
                assert max_bytes(field.message_type) <= limit.each_bytes, path
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            assert limit.of == (Of.BYTES if field.type == field.TYPE_BYTES else Of.CHARACTERS), path
        elif field.message_type is not None or field.type in (field.TYPE_BOOL, field.TYPE_ENUM):
            assert limit.of == Of.NOTHING, path
        else:
            assert limit.of == Of.VALUE or path == "sampling.seed", path
        if limit.of != Of.NOTHING:
            resolve(limit.checked_by)


def max_bytes(descriptor: Any) -> int:
    """The size of a message of numbers: a tag and at most 10 bytes each."""
    assert all(field.message_type is None and not field.is_repeated for field in descriptor.fields)
    return 11 * len(descriptor.fields)


def resolve(name: str) -> Any:
    """The function below scheduler_svc.frontend that a limit names."""
    module, parts = "scheduler_svc.frontend", name.split(".")
    while parts:
        try:
            found = importlib.import_module(f"{module}.{parts[0]}")
        except ModuleNotFoundError:
            break
        module, parts = found.__name__, parts[1:]
    return functools.reduce(getattr, parts, importlib.import_module(module))


def most(limit: Limit) -> Any:
    return getattr(SIZES, limit.most) if isinstance(limit.most, str) else limit.most


def beyond(field: Any, limit: Limit) -> list[Any]:
    """Values of a field just beyond its limit."""
    top = most(limit)
    if limit.of == Of.CHARACTERS:
        return ["x" * (top + 1)]
    if limit.of == Of.BYTES:
        return [b"x" * (top + 1)]
    if limit.of == Of.ENTRIES:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return [dict.fromkeys(range(top + 1), 1.0)]
        one = message_factory.GetMessageClass(field.message_type)() if field.message_type is not None else None
        one = "x" * 64 if field.type == field.TYPE_STRING else 1 if one is None else one
        return [[one] * (top + 1)]
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        kind = np.float32 if field.type == field.TYPE_FLOAT else np.float64
        low = limit.least if limit.is_above else float(np.nextafter(kind(limit.least), kind(-np.inf)))
        return [low, float(np.nextafter(kind(top), kind(np.inf))), float("inf"), float("-inf"), float("nan")]
    values = [int(limit.least) - 1, top + 1]
    unsigned = field.type in (field.TYPE_UINT32, field.TYPE_UINT64)
    return [value for value in values if (0 if unsigned else -(2**31)) <= value <= (2**32 - 1 if unsigned else 2**31)]


def put(message: Any, path: str, value: Any) -> None:
    *above, name = path.split(".")
    owner = functools.reduce(getattr, above, message)
    if isinstance(value, dict):
        getattr(owner, name).update(value)
    elif isinstance(value, list):
        getattr(owner, name).extend(value)
    else:
        setattr(owner, name, value)


def sent_to(method: Any) -> list[tuple[str, bytes, Limit]]:
    """Requests with one field beyond its limit."""
    found: list[tuple[str, bytes, Limit]] = []
    for path, field in paths(method.input_type):
        limit = LIMITS[method.input_type.full_name][path]
        # Fields inside lists are bounded by the scan; its tests have them.
        is_inside_list = any(path.startswith(f"{each}.") for each in LISTS_WITH_FIELDS)
        for value in beyond(field, limit) if limit.of != Of.NOTHING and not is_inside_list else ():
            message: Any = message_factory.GetMessageClass(method.input_type)()
            if method.name in ("Generate", "Tokenize"):
                message.text = "the"
            if method.name == "Detokenize":
                message.token_ids.append(1)
            if method.name == "Resume":
                message.request_id, message.resume_secret = "r", b"s"
            if path == "token_ids.ids":
                message.ClearField("text")
            if method.name == "RenderChat" or path.startswith("chat."):
                message.chat.messages.add(role="user", content=["the"])
            put(message, path, value)
            found.append((path, message.SerializeToString(), limit))
    return found


def test_a_value_beyond_each_limit_is_refused_by_name(run: Run) -> None:
    """Requests of all methods with one field just beyond its limit; the core gets none of them."""
    named = 0

    async def scenario(s: Service) -> None:
        nonlocal named
        for method in METHODS:
            full = f"/{method.containing_service.full_name}/{method.name}"
            for path, data, limit in sent_to(method):
                stub = cast(Any, s.channel.stream_stream)(full)
                call = stub(iter([data]), timeout=TIMEOUT_SECONDS)
                status, details = await call.code(), await call.details()
                assert status == grpc.StatusCode.INVALID_ARGUMENT, (full, path, details)
                # The prompt's length is the same for a text and for token ids, and all text of a chat counts together.
                other = {"token_ids.ids": "prompt", "chat.template_args_json": "chat has"}.get(path, path)
                other = "constraint: it has" if path.startswith("constraint.") else other
                assert path in details or details.startswith(other), (full, path, details)
                number = f"{most(limit):g}" if limit.of == Of.VALUE else str(most(limit))
                low = f"{limit.least:.7g}"
                assert any(each in details.replace(",", "") for each in (number, low, str(most(limit)))), details
                named += 1
        assert await s.core.is_silent()

    run(scenario, state=STATE)
    assert named > 60


def test_the_model_info_tells_the_limits(run: Run) -> None:
    async def scenario(s: Service) -> None:
        info = await s.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        limits = LIMITS["tandem.v1.GenerateRequest"]
        told = info.limits
        assert all(value for _, value in told.ListFields())
        assert {field.name for field, _ in told.ListFields()} == {
            field.name for field in told.DESCRIPTOR.fields if field.name != "max_new_tokens"
        }
        assert told.max_message_bytes == 1 << 20
        assert (told.max_prompt_tokens, told.max_text_chars) == (SIZES.prompt_tokens, SIZES.text_chars)
        assert (told.min_priority, told.max_priority) == (limits["priority"].least, limits["priority"].most)
        assert told.max_stop_strings == limits["stop.stop_strings"].most
        assert told.max_stop_token_ids == limits["stop.stop_token_ids"].most
        assert told.max_salt_chars == limits["cache.salt"].most
        assert told.max_request_id_chars == limits["request_id"].most
        assert told.max_listed_tokens == limits["sampling.logit_bias"].most
        assert told.max_time_seconds == limits["stop.max_time_seconds"].most
        assert told.max_linger_seconds == limits["resume.linger_seconds"].most
        assert told.max_chat_messages == limits["chat.messages"].most
        assert told.max_chat_tools == limits["chat.tools_json"].most
        assert told.max_abort_ids == LIMITS["tandem.v1.AbortRequest"]["request_ids"].most
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
        call.cancel()

    run(scenario)
