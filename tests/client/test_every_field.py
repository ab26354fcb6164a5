"""Every field of the public API, and what carries it: the HTTP gateway, the Python client, or none, with a reason.

A field that is added to a request or an answer fails here until a row says where callers find it. `tandem generate` has
the same by its own table of flags (tests/client/cli/test_commands.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2

from tandem_client import calls, types
from tandem_client.wire.request import generate_request, resume_request
from tests.client.descriptors import paths
from tests.client.gateway.asked import Noting, asker
from tests.client.sampling import EXAMPLES

SERVICES = (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR)
METHODS = [method for file in SERVICES for each in file.services_by_name.values() for method in each.methods]
USER = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f"}}


@dataclass(frozen=True, slots=True)
class Row:
    """How a field is set: by a path of HTTP with a body, and by what makes the Python client's message; or why not."""

    http: tuple[str, dict[str, Any]] | str
    python: Callable[[], Message] | str


def text(python: Mapping[str, Any] | str, http: Mapping[str, Any] | str) -> Row:
    """A completion: the client's keywords, and the fields of the body."""
    return Row(
        http if isinstance(http, str) else ("/v1/completions", {"prompt": "a", **http}),
        python if isinstance(python, str) else lambda: generate_request("a", **python),
    )


def message(**values: Any) -> dict[str, Any]:
    """The keywords of a chat with these fields in its last message."""
    return {"chat": [USER, CALLED, {**USER, **values}]}


def same(**values: Any) -> Row:
    """Fields with one name."""
    return text(values, values)


def asks(path: str, body: dict[str, Any], rpc: Callable[..., calls.Rpc[Any]], *args: Any, **options: Any) -> Row:
    """A call with one answer."""
    return Row((path, body), lambda: made(rpc(*args, **options)))


def made(rpc: calls.Rpc[Any]) -> Message:
    assert isinstance(rpc.request, Message)
    return rpc.request


def of_operators(name: str, rpc: calls.Rpc[Any]) -> dict[str, Row]:
    """Rows of a call that only operators make: it sets each field of its request."""
    return {f"{name}.{path}": Row(_NO_OPERATORS, lambda: made(rpc)) for path in paths(made(rpc).DESCRIPTOR)}


_OWN_STREAM = "a client of HTTP cannot continue a stream; if it leaves, its request ends"
_NO_OPERATORS = "operators use `tandem` or the Python client; HTTP serves completions"
_NO_TIMES = "OpenAI's API has no such field; a client that leaves ends its request"
_OF_ANSWERS = "no template reads it, so it changes no ids"
# Of a chat: the client's keywords; the fields of the body, if they have other names; why ids do not depend on it.
CHATS: dict[str, tuple[dict[str, Any], dict[str, Any] | str, str]] = {
    "messages.role": ({}, {}, ""),
    "messages.content": ({}, {}, ""),
    "messages.reasoning": (message(role="assistant", reasoning="r"), {}, ""),
    "messages.tool_calls.id": (message(), {}, ""),
    "messages.tool_calls.name": (message(), {}, ""),
    "messages.tool_calls.arguments_json": (message(), {}, ""),
    "messages.tool_call_id": (message(role="tool", tool_call_id="c"), {}, ""),
    "messages.name": (message(name="n"), {}, ""),
    "tools_json": ({"tools": [TOOL]}, {}, ""),
    "tool_choice.mode": ({"tools": [TOOL], "tool_choice": "required"}, {}, _OF_ANSWERS),
    "tool_choice.name": ({"tools": [TOOL], "tool_choice": TOOL}, {}, _OF_ANSWERS),
    "parallel_tool_calls": ({"tools": [TOOL], "parallel_tool_calls": False}, {}, _OF_ANSWERS),
    "template_args_json": ({"template_args": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}, ""),
    "continue_final_message": ({"continue_final_message": True}, {}, ""),
    "add_generation_prompt": ({"add_generation_prompt": False}, {}, ""),
    "unparsed": ({"parsed": False}, "OpenAI's answers have calls and reasoning apart from the text", _OF_ANSWERS),
}


def chat_body(python: dict[str, Any], http: dict[str, Any]) -> dict[str, Any]:
    renamed = http or python
    return {"messages": python.get("chat", [USER])} | {name: renamed[name] for name in renamed if name != "chat"}


def generates(python: dict[str, Any], http: dict[str, Any] | str, _: str) -> Row:
    """A chat that is answered."""
    return Row(
        http if isinstance(http, str) else ("/v1/chat/completions", chat_body(python, http)),
        lambda: generate_request(None, **{"chat": [USER], **python}),
    )


def renders(python: dict[str, Any], http: dict[str, Any] | str, why: str) -> Row:
    """A chat of which only the ids are asked for."""
    options = {name: value for name, value in python.items() if name != "chat"}
    return Row(
        why or ("/tokenize", chat_body(python, cast(dict[str, Any], http))),
        why if "parsed" in python else lambda: made(calls.render_chat(python.get("chat", [USER]), **options)),
    )


COMPLETIONS: dict[str, Row] = {
    "request_id": text({"request_id": "r"}, {}),
    "model": same(model="m"),
    "text": same(),
    "token_ids.ids": Row(("/v1/completions", {"prompt": [1]}), lambda: generate_request([1])),
    **{f"sampling.{name}": same(**{name: value}) for name, value in EXAMPLES.items()},
    "sampling.num_samples": text({"num_samples": 2}, {"n": 2}),
    "sampling.logit_bias": text({"logit_bias": {5: 1.0}}, {"logit_bias": {"5": 1.0}}),
    "sampling.allowed_token_ids.ids": same(allowed_token_ids=[5]),
    "sampling.banned_token_ids": text({"banned_token_ids": [5]}, "logit_bias bans by -100, as in OpenAI's API"),
    "stop.max_new_tokens": text({"max_new_tokens": 5}, {"max_tokens": 5}),
    "stop.min_new_tokens": text({"min_new_tokens": 5}, {"min_tokens": 5}),
    "stop.stop_strings": same(stop=["a"]),
    "stop.stop_token_ids": same(stop_token_ids=[5]),
    "stop.ignore_eos": same(ignore_eos=True),
    "stop.include_stop": text({"include_stop": True}, {"include_stop_str_in_output": True}),
    "stop.max_time_seconds": text({"max_time_seconds": 5}, _NO_TIMES),
    "output.want_text": text({"want_text": False}, "OpenAI's answers are text"),
    "output.want_token_ids": text({"want_token_ids": True}, {"return_token_ids": True}),
    "output.skip_special_tokens": same(skip_special_tokens=False),
    "output.logprobs": same(logprobs=2),
    "output.prompt_logprobs_start": text({"prompt_logprobs_start": 0}, {"prompt_logprobs": 2}),
    "output.logprob_pieces": text({"logprobs": 2, "logprob_pieces": True}, {"logprobs": 2}),
    "priority": same(priority=5),
    "cache.salt": same(cache_salt="s"),
    "cache.bypass_read": text({"bypass_cache_read": True}, "a salt that is new bypasses the cache as well"),
    "cache.bypass_write": text({"bypass_cache_write": True}, "a salt that is used once leaves pages that nobody finds"),
    "resume.linger_seconds": text({"linger_seconds": 5}, _OWN_STREAM),
    "max_queue_seconds": text({"max_queue_seconds": 5}, _NO_TIMES),
    "add_special_tokens": same(add_special_tokens=False),
    "constraint.json_schema": text({"json_schema": {}}, {"guided_json": {}}),
    "constraint.json_object": text({"json_object": True}, {"response_format": {"type": "json_object"}}),
    "constraint.regex": text({"regex": "a"}, {"guided_regex": "a"}),
    "constraint.choices.choices": text({"choices": ["a"]}, {"guided_choice": ["a"]}),
    "constraint.lark": text({"lark": "start: A"}, {"guided_grammar": "start: A"}),
}  # fmt: skip
_TOKENIZE, _DETOKENIZE = {"prompt": "a", "add_special_tokens": False, "model": "m"}, {"tokens": [1], "model": "m"}
_TALK = {"messages": [USER], "model": "m"}
RECEIVED = types.SampleOffset(token_ids=1, text_chars=1, reasoning_chars=1, tool_calls=1, tool_argument_chars=1)
_PIECES = "logprob_pieces has what each token adds to the text"
ROWS: dict[str, Row] = {
    **{f"GenerateRequest.{path}": row for path, row in COMPLETIONS.items()},
    **{f"GenerateRequest.chat.{path}": generates(*row) for path, row in CHATS.items()},
    **{f"RenderChatRequest.chat.{path}": renders(*row) for path, row in CHATS.items()},
    "RenderChatRequest.model": asks("/tokenize", _TALK, calls.render_chat, [USER], model="m"),
    "TokenizeRequest.model": asks("/tokenize", _TOKENIZE, calls.tokenize, "a", model="m"),
    "TokenizeRequest.text": asks("/tokenize", _TOKENIZE, calls.tokenize, "a"),
    "TokenizeRequest.add_special_tokens": asks("/tokenize", _TOKENIZE, calls.tokenize, "a", add_special_tokens=False),
    "DetokenizeRequest.model": asks("/detokenize", _DETOKENIZE, calls.detokenize, [1], model="m"),
    "DetokenizeRequest.token_ids": asks("/detokenize", _DETOKENIZE, calls.detokenize, [1]),
    "DetokenizeRequest.skip_special_tokens": asks(
        "/detokenize", _DETOKENIZE, calls.detokenize, [1], skip_special_tokens=False
    ),
    "DetokenizeRequest.separately": Row(("/tokenize", {**_TOKENIZE, "return_token_strs": True}), _PIECES),
    "AbortRequest.request_ids": Row(_NO_OPERATORS, lambda: made(calls.abort("r"))),
    **{
        f"ResumeRequest.{path}": Row(_OWN_STREAM, lambda: resume_request("r", b"s", [RECEIVED]))
        for path in (
            "request_id", "resume_secret", "offsets.token_ids", "offsets.text_chars", "offsets.reasoning_chars",
            "offsets.tool_calls", "offsets.tool_argument_chars",
        )
    },
    "ClearQuarantineRequest.keys": Row(_NO_OPERATORS, lambda: made(calls.clear_quarantine("k"))),
    **of_operators("ListRequestsRequest", calls.list_requests(
        tenant="t", states=["running"], id_prefix="r", page_size=5, page_token="p"
    )),
    **of_operators("DrainRequest", calls.drain("w", max_seconds=1, force=True)),
    **of_operators("UpdateWeightsRequest", calls.update_weights("/f", version="v", in_turn=True, max_seconds=1)),
}  # fmt: skip


def is_set(found: Message, path: str) -> bool:
    """Whether the field of a path has a value, in one message of a list at least."""
    name, _, below = path.partition(".")
    field: FieldDescriptor = found.DESCRIPTOR.fields_by_name[name]
    value = getattr(found, name)
    if below:
        return any(is_set(each, below) for each in (value if field.is_repeated else [value]))
    return found.HasField(name) if field.has_presence else bool(value)


def test_every_field_of_a_request_has_a_row_and_every_row_a_field() -> None:
    requests = {method.input_type.name: method.input_type for method in METHODS}
    known = {f"{name}.{path}" for name, descriptor in requests.items() for path in paths(descriptor)}
    assert known == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_sets_its_field(name: str) -> None:
    kind, _, path = name.partition(".")
    row = ROWS[name]
    if not isinstance(row.python, str):
        assert is_set(row.python(), path)
    if not isinstance(row.http, str):
        service = Noting()
        answer = asker(service)("POST", row.http[0], json=row.http[1])
        assert answer.status_code in (200, 418), answer.text
        [found] = [each for each in service.requests if each.DESCRIPTOR.name == kind]
        assert is_set(found, path)


# Messages of answers that have other names in Python, or another shape.
ANSWERS: Mapping[str, type | str] = {
    "GetLoadResponse": types.Load,
    "GetModelInfoResponse": types.ModelInfo,
    "DrainResponse": types.DrainProgress,
    "UpdateWeightsResponse": types.UpdateProgress,
    "ListRequestsResponse": types.RequestPage,
    "RequestEntry": types.ListedRequest,
    "RenderChatResponse": types.RenderedChat,
    "GenerateResponse": "each of its events has a class",
    "Logprobs": "TokenLogprob has those of one token; ProtocolError guards the shape",
    "AbortResponse": "a dict of outcomes by id",
    "AbortResult": "a dict of outcomes by id",
    "TokenizeResponse": "a list of ids",
    "DetokenizeResponse": "a text",
    "FlushCacheResponse": "a number",
    "ClearQuarantineResponse": "a number",
    "ListQuarantineResponse": "a list",
    "GetCallerResponse": "the gateway asks who calls it",
    "TokenIds": "lists of tokens are not sent back",
    # The settings in force, and a model's defaults, have no lists of tokens.
    "SamplingParams": types.Sampling,
}
NOT_SENT = {"SamplingParams": {"logit_bias", "allowed_token_ids", "banned_token_ids"}}


def reached(descriptor: Descriptor, found: dict[str, Descriptor]) -> dict[str, Descriptor]:
    """A message and all that are in it, by name."""
    if descriptor.name not in found and not descriptor.GetOptions().map_entry:
        found[descriptor.name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                reached(field.message_type, found)
    return found


def test_every_field_of_an_answer_has_a_field_in_python() -> None:
    found = dict[str, Descriptor]()
    for method in METHODS:
        reached(method.output_type, found)
    assert ANSWERS.keys() <= found.keys()
    lost = dict[str, set[str]]()
    for name, descriptor in found.items():
        cls = ANSWERS.get(name) or getattr(types, name)
        if isinstance(cls, str):
            continue
        missing = {field.name for field in descriptor.fields} - {field.name for field in fields(cls)}
        lost |= {name: missing} if missing != NOT_SENT.get(name, set()) else {}
    assert lost == {}
