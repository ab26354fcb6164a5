"""Every field of OpenAI's requests is served, ignored or refused; the list is the `openai` package's own."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chats
from typing_extensions import get_type_hints, is_typeddict

from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.openai import bodies
from tandem_client.gateway.openai.fields import Body
from tandem_client.gateway.openai.wanted import chat_completion, completion

USER: dict[str, Any] = {"role": "user", "content": "a"}
F: dict[str, Any] = {"name": "f"}
TOOL = {"type": "function", "function": F}
# What asks for a field, with what it needs beside it.
SHARED: Mapping[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": 1}},
    "max_tokens": {"max_tokens": 5},
    "model": {"model": "m"},
    "n": {"n": 2},
    "presence_penalty": {"presence_penalty": 0.5},
    "seed": {"seed": 5},
    "stop": {"stop": ["a"]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "user": {"user": "u"},
}
COMPLETIONS: Mapping[str, dict[str, Any]] = SHARED | {
    "best_of": {"best_of": 2, "n": 2},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
    "prompt": {"prompt": [1]},
    "suffix": {"suffix": "b"},
}
CHATS: Mapping[str, dict[str, Any]] = SHARED | {
    "audio": {"audio": {"voice": "ash", "format": "wav"}},
    "function_call": {"functions": [F], "function_call": F},
    "functions": {"functions": [F]},
    "logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "messages": {"messages": [USER, USER]},
    "metadata": {"metadata": {"a": "b"}},
    "modalities": {"modalities": ["text", "audio"]},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "prediction": {"prediction": {"type": "content", "content": "a"}},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "prompt_cache_options": {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "reasoning_effort": {"reasoning_effort": "low"},
    "response_format": {"response_format": {"type": "json_object"}},
    "safety_identifier": {"safety_identifier": "u"},
    "service_tier": {"service_tier": "flex"},
    "store": {"store": True},
    "tool_choice": {"tools": [TOOL], "tool_choice": TOOL},
    "tools": {"tools": [TOOL]},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "verbosity": {"verbosity": "low"},
    "web_search_options": {"web_search_options": {}},
}
# Taken, and the same as without it: a field that says again what another one says.
_TWICE = {"best_of"}
REQUESTS = {"completions": of_completions, "chats": of_chats}


def hints(module: Any) -> dict[str, Any]:
    """The fields of a request of the package."""
    kinds = get_args(module.CompletionCreateParams)
    return {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}


@pytest.mark.parametrize(("name", "rows"), [("completions", COMPLETIONS), ("chats", CHATS)])
def test_every_field_of_the_package_has_a_row(name: str, rows: Mapping[str, Any]) -> None:
    assert hints(REQUESTS[name]).keys() == rows.keys()


ROWS = [
    (body, name, asked)
    for body, rows in ((bodies.Completion, COMPLETIONS), (bodies.Chat, CHATS))
    for name, asked in rows.items()
]


@pytest.mark.parametrize(("body", "name", "asked"), ROWS, ids=[f"{body.__name__}-{name}" for body, name, _ in ROWS])
def test_a_field_is_served_or_ignored_or_refused_with_its_reason(
    body: type[Body], name: str, asked: dict[str, Any]
) -> None:
    make = completion if body is bodies.Completion else chat_completion
    least: dict[str, Any] = {"prompt": "a"} if body is bodies.Completion else {"messages": [USER]}
    without = make({**least, **{key: value for key, value in asked.items() if key != name}})
    assert (name in body.KNOWN) + (name in body.IGNORED) + (name in body.WITHOUT_EFFECT) == 1
    if name in body.WITHOUT_EFFECT:
        with pytest.raises(HttpError) as caught:
            make({**least, **asked})
        only = body.WITHOUT_EFFECT[name]
        assert caught.value.param == name and caught.value.message.endswith(f" is supported: {only.why}")
        return
    assert (make({**least, **asked}) == without) == (name in body.IGNORED or name in _TWICE)


# The objects of a request: the model that reads them, or why none does. Names that are not unique have their module's.
_SERVICE = "the service reads it"
_REFUSED = "its type is refused"
OBJECTS: Mapping[str, type[Body] | str] = {
    "ChatCompletionAllowedToolChoiceParam": _REFUSED,
    "ChatCompletionAssistantMessageParam": bodies.Message,
    "ChatCompletionContentPartImageParam": _REFUSED,
    "ChatCompletionContentPartInputAudioParam": _REFUSED,
    "ChatCompletionContentPartRefusalParam": bodies.RefusalPart,
    "ChatCompletionContentPartTextParam": bodies.TextPart,
    "ChatCompletionCustomToolParam": _SERVICE,
    "ChatCompletionDeveloperMessageParam": bodies.Message,
    "ChatCompletionFunctionCallOptionParam": bodies.ToolName,
    "ChatCompletionFunctionMessageParam": bodies.Message,
    "ChatCompletionFunctionToolParam": _SERVICE,
    "ChatCompletionMessageCustomToolCallParam": _REFUSED,
    "ChatCompletionMessageFunctionToolCallParam": bodies.Call,
    "ChatCompletionNamedToolChoiceCustomParam": _REFUSED,
    "ChatCompletionNamedToolChoiceParam": bodies.NamedTool,
    "ChatCompletionStreamOptionsParam": bodies.StreamOptions,
    "ChatCompletionSystemMessageParam": bodies.Message,
    "ChatCompletionToolMessageParam": bodies.Message,
    "ChatCompletionUserMessageParam": bodies.Message,
    "ResponseFormatJSONObject": bodies.ResponseFormat,
    "ResponseFormatJSONSchema": bodies.ResponseFormat,
    "ResponseFormatText": bodies.ResponseFormat,
    "chat_completion_assistant_message_param.FunctionCall": bodies.Function,
    "chat_completion_content_part_param.File": _REFUSED,
    "chat_completion_message_function_tool_call_param.Function": bodies.Function,
    "chat_completion_named_tool_choice_param.Function": bodies.ToolName,
    "completion_create_params.Function": _SERVICE,
    "response_format_json_schema.JSONSchema": bodies.JsonSchema,
}


def objects(hint: Any) -> Iterator[Any]:
    """The objects of a type."""
    if is_typeddict(hint):
        yield hint
    for each in get_args(hint):
        yield from objects(each)


def label(kind: Any) -> str:
    is_unique = kind.__name__.startswith(("ChatCompletion", "ResponseFormat"))
    return kind.__name__ if is_unique else f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def test_every_field_of_the_objects_in_a_request_is_known() -> None:
    seen, unknown = set[str](), set[str]()

    def look(place: str, fields: Mapping[str, Any], model: type[Body]) -> None:
        unknown.update(
            f"{place}.{name}" for name in fields.keys() - {*model.KNOWN, *model.IGNORED, *model.WITHOUT_EFFECT}
        )
        for kind in (kind for name in fields.keys() & model.KNOWN for kind in objects(fields[name])):
            if (name := label(kind)) not in seen:
                seen.add(name)
                if not isinstance(inner := OBJECTS.get(name, _SERVICE), str):
                    look(name, get_type_hints(kind), inner)

    look("completions", hints(of_completions), bodies.Completion)
    look("chats", hints(of_chats), bodies.Chat)
    assert (unknown, seen) == (set(), set(OBJECTS))
