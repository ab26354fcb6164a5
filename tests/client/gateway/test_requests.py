"""Requests of OpenAI's API as messages of the service, field by field, and what is refused by name."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError
from tandem.v1 import chat_pb2, inference_pb2

from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.openai import bodies
from tandem_client.gateway.openai import wanted as names
from tandem_client.gateway.openai.wanted import chat_completion, completion
from tandem_client.wire.parts import IGNORED_IN_MESSAGES
from tandem_client.wire.rpc_errors import name_of, with_names
from tests.client.sampling import EXAMPLES

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
F: dict[str, Any] = {"name": "f"}
TOOL = {"type": "function", "function": F}


def only(values: dict[str, Any]) -> inference_pb2.GenerateRequest:
    """The one request of a completion."""
    [request] = completion({"prompt": "a", **values}).requests
    return request


def chat(values: dict[str, Any]) -> inference_pb2.GenerateRequest:
    [request] = chat_completion({**CHAT, **values}).requests
    return request


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        *((name, value, f"sampling.{name}") for name, value in EXAMPLES.items() if name != "num_samples"),
        ("n", 3, "sampling.num_samples"),
        ("min_tokens", 2, "stop.min_new_tokens"), ("max_tokens", 5, "stop.max_new_tokens"),
        ("ignore_eos", True, "stop.ignore_eos"), ("include_stop_str_in_output", True, "stop.include_stop"),
        ("skip_special_tokens", False, "output.skip_special_tokens"), ("priority", -5, "priority"),
        ("cache_salt", "s", "cache.salt"), ("model", "m", "model"),
    ],
)  # fmt: skip
def test_plain_fields(field: str, value: object, path: str) -> None:
    for request in (only({field: value}), chat({field: value})):
        found: Any = request
        for step in path.split("."):
            found = getattr(found, step)
        assert found == value
    # Errors of the service name the field as the caller does.
    assert names.COMPLETION[path] == names.CHAT[path] == field


@pytest.mark.parametrize("value", [None, -1])
def test_no_top_k(value: int | None) -> None:
    assert only({"top_k": value}).sampling.top_k == 0


def test_a_negative_seed_is_one_of_its_own() -> None:
    assert only({"seed": -5}).sampling.seed == 2**64 - 5
    assert only({"seed": -(2**63)}).sampling.seed == 2**63


def test_lists() -> None:
    request = only({"stop": "x", "stop_token_ids": [1, 2], "allowed_token_ids": [3], "logit_bias": {"7": 1, "8": -2.5}})
    assert list(request.stop.stop_strings) == ["x"] and list(request.stop.stop_token_ids) == [1, 2]
    assert list(request.sampling.allowed_token_ids.ids) == [3]
    assert dict(request.sampling.logit_bias) == {7: 1.0, 8: -2.5}


def test_users_have_salts_of_their_own() -> None:
    salts = [
        only(values).cache.salt
        for values in ({}, {"cache_salt": "a"}, {"user": "a"}, {"user": "b"}, {"user": "a", "cache_salt": "a"})
    ]
    assert len(set(salts)) == 5 and salts[0] == "" and all(len(salt) <= 256 for salt in salts)
    assert only({"user": "x" * 10_000}).cache.salt != only({"user": "x" * 9_999}).cache.salt


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"nonsense": 1}, "nonsense", "there is no field nonsense"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"temperature": "hot"}, "temperature", 'temperature is "hot"; it must be a number'),
        ({"temperature": True}, "temperature", "temperature is true; it must be a number"),
        ({"temperature": 10**400}, "temperature", "temperature is a number of 1329 bits; it must be a number"),
        ({"temperature": math.inf}, "temperature", "it must be a finite number"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be a whole number"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be greater than or equal to 0"),
        ({"n": 10**5000}, "n", "n is a number of"),
        ({"n": 2**32}, "n", "n is 4294967296; it must be less than or equal to 4294967295"),
        ({"seed": 2**64}, "seed", "it must be"),
        ({"stop": [1]}, "stop[0]", "stop[0] is 1; it must be a string"),
        ({"stop": "\ud800"}, "stop", "it is not Unicode text"),
        ({"logit_bias": {"x": 1}}, "logit_bias[x]", "it must be a whole number"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[1]", "it must be a number"),
        ({"logit_bias": [1]}, "logit_bias", "it must be an object"),
        ({"best_of": 3}, "best_of", "best_of is 3; only 1 is supported"),
        ({"suffix": "x"}, "suffix", 'suffix is "x"; only null is supported'),
        ({"use_beam_search": True}, "use_beam_search", "use_beam_search is true; only false is supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "there is no field stream_options.x"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": [[]]}, "prompt", "prompt is empty"),
        ({"prompt": [[1], []]}, "prompt[1]", "prompt[1] is empty"),
        ({"prompt": [1, "a"]}, "prompt[1]", 'prompt[1] is "a"; it must be a whole number'),
        ({"prompt": [1, -1]}, "prompt[1]", "prompt[1] is -1"),
        ({"prompt": ["a"] * 257}, "prompt", "prompt has 257 prompts; the limit is 256"),
        ({"prompt": 7}, "prompt", "it must be a string, a list of token ids, or a list of these"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", 'response_format.type is "yaml"'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex are set"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "there is no field structured_outputs.xml"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "it must be a list"),
    ],
)
def test_refusals_of_completions(values: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        completion({"prompt": "a", **values})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert words in caught.value.message and len(caught.value.message) < 300
    assert json.loads(caught.value.body())["error"]["param"] == field


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "messages is empty; at least 1 message is needed"),
        ({"messages": [1]}, "messages[0]", "it must be an object"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "a string or a list of parts"),
        (
            parts({"type": "text", "text": "a"}, {"type": "image_url"}), "messages[0].content[1]",
            "only text parts are supported",
        ),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood", "there is no field"),
        (parts({"type": "text", "text": "a", "l": 1}), "messages[0].content[0].l", "there is no field"),
        (assistant(tool_calls=[{"type": "custom"}]), "messages[0].tool_calls[0].type", "it must be function"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "give one of them"),
        ({"tool_choice": "maybe"}, "tool_choice", "it must be auto, none or required"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "it must be function"),
        ({"tools": [1]}, "tools[0]", "it must be an object"),
        ({"functions": "\ud800"}, "functions", "it must be a list"),
        ({"functions": [1]}, "functions[0]", "it must be an object"),
        ({"function_call": "auto"}, "function_call", "function_call needs functions"),
        ({"functions": [F], "function_call": "required"}, "function_call", "it must be auto or none"),
        ({"functions": [F], "function_call": {"type": "function"}}, "function_call.name", "is missing"),
        ({"functions": [F], "tools": [F]}, "tools", "tools and functions are set"),
        ({"functions": [F], "tool_choice": "auto"}, "tool_choice", "tool_choice and functions are set"),
        ({"functions": [F], "parallel_tool_calls": True}, "parallel_tool_calls", "and functions are set"),
        (
            assistant(function_call={"name": "f"}, tool_calls=[{"function": F}]), "messages[0].function_call",
            "messages[0].function_call and tool_calls are set",
        ),
        (assistant(function_call={}), "messages[0].function_call.name", "is missing"),
        ({"moderation": {"model": "m"}}, "moderation", "only null is supported: nothing is moderated"),
        ({"\ud800": 1}, "\\ud800", "there is no field"),
        ({"chat_template": "{{x}}"}, "chat_template", "only null is supported"),
        ({"modalities": ["audio"]}, "modalities", 'only ["text"] is supported'),
        (
            {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt",
            "exclude each other",
        ),
    ],
)  # fmt: skip
def test_refusals_of_chats(values: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat_completion({**CHAT, **values})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert words in caught.value.message


def test_an_answer_goes_back_as_openais_client_sends_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    before = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": [call], "reasoning_content": "hm", "reasoning": None,
    }  # fmt: skip
    texts = [{"type": "text", "text": "5"}, {"type": "text", "text": "6"}]
    after = {"role": "tool", "tool_call_id": "c1", "content": texts}
    sent = chat_pb2.ToolCall(id="c1", name="f", arguments_json='{"a":1}')
    assert list(chat({"messages": [*CHAT["messages"], before, after]}).chat.messages) == [
        chat_pb2.ChatMessage(role="user", content=["hi"]),
        chat_pb2.ChatMessage(role="assistant", reasoning="hm", tool_calls=[sent]),
        chat_pb2.ChatMessage(role="tool", content=["5", "6"], tool_call_id="c1"),
    ]


# Whole numbers, each with the way to it. Lists and the keys of a bias have them too.
INTEGERS: list[tuple[dict[str, Any], bool]] = [
    *(({name: 16}, True) for name in ("max_tokens", "top_k", "seed", "n", "min_tokens", "priority", "prompt_logprobs")),
    ({"top_k": -1}, True),
    ({"seed": -5}, True),
    ({"stop_token_ids": [7, 8]}, True),
    ({"allowed_token_ids": [7]}, True),
    ({"logprobs": 3}, False),
    ({"best_of": 1}, False),
    ({"length_penalty": 1}, True),
    ({"prompt": [1, 2]}, False),
    ({"prompt": [[1, 2], [3]]}, False),
]


def as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_floats(each) for key, each in value.items()}
    return [as_floats(each) for each in value] if isinstance(value, list) else float(value)


@pytest.mark.parametrize(("values", "is_of_chats"), INTEGERS, ids=str)
def test_a_whole_number_may_have_a_point(values: dict[str, Any], is_of_chats: bool) -> None:
    assert completion({"prompt": "a", **as_floats(values)}) == completion({"prompt": "a", **values})
    of_chats = values if is_of_chats else {"max_completion_tokens": 3, "top_logprobs": 3}
    floats = {"logprobs": True, **as_floats(of_chats)}
    assert chat_completion({**CHAT, **floats}) == chat_completion({**CHAT, "logprobs": True, **of_chats})


@pytest.mark.parametrize("value", [16.5, math.inf, 1e300, True, "16"])
def test_other_numbers_are_refused(value: object) -> None:
    with pytest.raises(HttpError, match=r"max_tokens is .*; it must be") as caught:
        only({"max_tokens": value})
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    "values",
    [
        {f"a{i}": 0 for i in range(1000)},
        {"stop_token_ids": [""] * 1000},
        {"stop": [1] * 1000},
        {"logit_bias": {str(i): "" for i in range(1000)}},
        {"logit_bias": {f"a{i}": 0 for i in range(1000)}},
        {"prompt": [["a"] * 1000] * 1000},
        {"messages": [[]] * 1000},
        {"messages": [{"role": "user", "content": [7] * 1000}]},
        {"messages": [{"tool_calls": [7] * 1000}]},
        {"tools": [7] * 1000},
    ],
    ids=str,
)
def test_a_body_of_many_faults_is_refused_for_few(values: dict[str, Any]) -> None:
    """Each fault that pydantic collects is an object; a body of 4 MiB may have a million."""
    for body in (bodies.Completion, bodies.Chat):
        with pytest.raises(ValidationError) as caught:
            body.model_validate({"prompt": "a", **CHAT, **values})
        assert caught.value.error_count() <= 4


@pytest.mark.parametrize("value", [True, False])
def test_special_tokens_of_a_text(value: bool) -> None:
    assert not only({}).HasField("add_special_tokens")
    for request in completion({"prompt": ["a", "b"], "add_special_tokens": value}).requests:
        assert request.HasField("add_special_tokens") and request.add_special_tokens is value


# What other servers and libraries add to an answer, and agents send back with it.
ADDED: dict[str, Any] = {name: {"any": ["thing"]} for name in IGNORED_IN_MESSAGES} | {
    "audio": None, "function_call": None, "refusal": None, "name": None, "tool_call_id": None, "reasoning": None,
}  # fmt: skip


OLD_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}},
    {"role": "function", "name": "f", "content": "5"},
    {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": "{}"}, "tool_calls": None},
    {"role": "function", "name": "g", "content": None},
    {"role": "user", "content": "and?"},
]
NEW_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"id": "call00001", "function": {"name": "f", "arguments": '{"a":1}'}}]},
    {"role": "tool", "name": "f", "content": "5", "tool_call_id": "call00001"},
    {"role": "assistant", "tool_calls": [{"id": "call00002", "function": {"name": "g", "arguments": "{}"}}]},
    {"role": "tool", "name": "g", "tool_call_id": "call00002"},
    {"role": "user", "content": "and?"},
]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"functions": [F]}, {"tools": [TOOL]}),
        ({"functions": [F], "function_call": "auto"}, {"tools": [TOOL], "tool_choice": "auto"}),
        ({"functions": [F], "function_call": "none"}, {"tools": [TOOL], "tool_choice": "none"}),
        ({"functions": [F], "function_call": F}, {"tools": [TOOL], "tool_choice": TOOL}),
        ({"functions": []}, {"tools": []}),
        ({"functions": [], "parallel_tool_calls": False}, {}),
        ({"functions": [F], "messages": OLD_TALK}, {"tools": [TOOL], "messages": NEW_TALK}),
    ],
)
def test_functions_are_tools_of_which_one_is_called(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert chat(old) == chat({**new, "parallel_tool_calls": False})
    assert chat_completion({**CHAT, **old}).calls_function and not chat_completion({**CHAT, **new}).calls_function


def test_a_history_in_the_old_form_needs_no_functions() -> None:
    assert chat({"messages": OLD_TALK}) == chat({"messages": NEW_TALK})
    # The result of a call that the history has lost.
    [found] = chat({"messages": OLD_TALK[2:3]}).chat.messages
    assert found == chat_pb2.ChatMessage(role="tool", name="f", content=["5"])


def test_what_others_add_to_the_history_changes_nothing() -> None:
    def history(added: dict[str, Any]) -> list[dict[str, Any]]:
        function = {**added, "name": "f", "arguments": "{}"}
        calls = [{"id": "c1", "type": "function", "function": function, **added}]
        part = {"type": "text", "text": "5", **added}
        return [
            {"role": "user", "content": [{**part}], **added},
            {"role": "assistant", "content": None, "tool_calls": calls, **added},
            {"role": "tool", "content": [{**part}], **added, "tool_call_id": "c1"},
            {"role": "assistant", "content": "yes", "prefix": True, "tool_calls": None},
        ]

    for added in (ADDED, dict.fromkeys(ADDED)):
        assert chat({"messages": history(added)}) == chat({"messages": history({})})


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('{"city": "Par', '{"city": "Par'), ("null", "null"), ("", ""), (None, ""), ([], "[]"), ("[]", "[]"),
        ({"a": 1}, '{"a":1}'), (7, "7"), ([1, "é"], '[1,"\\u00e9"]'),
    ],
)  # fmt: skip
def test_arguments_of_the_history_go_to_the_service_as_they_are(given: object, sent: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": given}}
    [found] = chat({"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]}).chat.messages[1:]
    assert found.tool_calls[0].arguments_json == sent


@pytest.mark.parametrize(
    ("values", "path", "name"),
    [
        ({}, "chat.messages[3].tool_calls[1].arguments_json", "messages[3].tool_calls[1].function.arguments"),
        ({}, "chat.messages[3].tool_calls[1].name", "messages[3].tool_calls[1].function.name"),
        ({}, "chat.messages[0].content", "messages[0].content"),
        ({}, "chat.messages[0].tool_calls", "messages[0].tool_calls"),
        ({}, "chat.tools_json[0].function.parameters.properties.a[1]", "tools[0].function.parameters.properties.a[1]"),
        ({}, "stop.stop_strings[2]", "stop[2]"),
        ({"max_tokens": 1}, "stop.max_new_tokens", "max_tokens"),
        ({"max_completion_tokens": 1}, "stop.max_new_tokens", "max_completion_tokens"),
        # The old form.
        ({"functions": [F]}, "chat.tools_json[1]", "functions[1]"),
        ({"functions": [F]}, "chat.tools_json[1].function.parameters.a[2]", "functions[1].parameters.a[2]"),
        ({"functions": [F]}, "chat.tool_choice.name", "function_call.name"),
        ({"functions": [F]}, "chat.tool_choice.mode", "function_call"),
        ({"functions": [F]}, "chat.messages[0].content", "messages[0].content"),
    ],
)
def test_an_error_names_a_field_that_the_caller_has(values: dict[str, Any], path: str, name: str) -> None:
    known = chat_completion({**CHAT, **values}).names
    assert name_of(path, known) == name
    assert with_names(f"{path} is wrong", known, field=path) == f"{name} is wrong"


def test_ignored_fields_change_nothing() -> None:
    given = {key: {"any": ["thing"]} for key in bodies.IGNORED}
    assert only(given) == only({}) and chat(given) == chat({})
    nulls = dict.fromkeys([*names.COMPLETION.values(), *bodies.OF_COMPLETIONS, "stream", "logprobs", "user"])
    del nulls["prompt"], nulls["x-request-id"]
    assert only({name: None for name in nulls if "." not in name}) == only({})


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"guided_json": "{}"}, "guided_json"),
    ],
)
def test_errors_of_a_constraint_name_the_field_that_set_it(values: dict[str, Any], name: str) -> None:
    wanted = chat_completion({**CHAT, **values})
    assert wanted.requests[0].constraint.json_schema == "{}"
    schema = name + ".json_schema.schema" if name == "response_format" else name
    for field, path in (("constraint", name), ("constraint.json_schema", schema)):
        assert name_of(field, wanted.names) == path
    # Places inside the schema are the caller's too, in the message and in `param`.
    inside = "constraint.json_schema.properties.a"
    assert name_of(inside, wanted.names) == f"{schema}.properties.a"
    assert with_names(f"{inside}: no", wanted.names, field=inside) == f"{schema}.properties.a: no"


@pytest.mark.parametrize(
    ("structured", "kind"),
    [({"json_object": True}, "json_object"), ({"json_object": False}, None), ({"json": False}, "json_schema")],
)
def test_what_is_false_in_structured_outputs(structured: dict[str, Any], kind: str | None) -> None:
    assert only({"structured_outputs": structured}).constraint.WhichOneof("kind") == kind


def test_both_names_of_the_length_may_have_one_value() -> None:
    assert chat({"max_tokens": 2.0, "max_completion_tokens": 2}).stop.max_new_tokens == 2
    assert not chat({"max_tokens": None, "max_completion_tokens": None}).stop.HasField("max_new_tokens")
