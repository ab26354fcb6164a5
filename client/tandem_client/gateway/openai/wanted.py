"""What one HTTP request asks for: the calls of the service, and how their answers are written. Pure: no I/O.

Owns the names of the service's fields in OpenAI's API, for errors.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tandem.v1 import chat_pb2, inference_pb2

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.openai.bodies import (
    Chat,
    Completion,
    Conversation,
    Function,
    Message,
    Options,
    StreamOptions,
    ToolName,
)
from tandem_client.gateway.openai.fields import Body, json_text, read
from tandem_client.wire.parts import CONSTRAINT_FIELDS
from tandem_client.wire.request import FIELD_KEYWORDS, PLACES, GenerateOptions, generate_request

# Each is a request of the service.
MAX_PROMPTS = 256
_RESPONSE = "response_format.json_schema"
_NO_USAGE = StreamOptions()
# The role of a result in the old form of calls.
_FUNCTION = "function"
_GUIDED = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "lark",
}  # fmt: skip


def _names(body: type[Body], more: Mapping[str, str]) -> dict[str, str]:
    aliases = {name: field.alias or name for name, field in body.model_fields.items()} | {"chat": "messages"}
    return {path: aliases.get(word, word) for path, word in FIELD_KEYWORDS.items()} | {
        "request_id": "x-request-id", "constraint": "response_format", **more,
    }  # fmt: skip


COMPLETION: Mapping[str, str] = _names(Completion, {"output.logprobs": "logprobs"})
CHAT: Mapping[str, str] = _names(
    Chat,
    {
        "prompt": "messages",
        "chat.messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
        "chat.messages[].tool_calls[].arguments_json": "messages[].tool_calls[].function.arguments",
        "chat.tool_choice.name": "tool_choice.function.name",
        "output.logprobs": "top_logprobs",
    },
)


# The names in a chat with `functions`, in the place of these.
_OLD_CALLS: Mapping[str, str] = {
    "chat.tools_json": "functions",
    "chat.tools_json[].function": "functions[]",
    "chat.tool_choice.name": "function_call.name",
    "chat.tool_choice.mode": "function_call",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One request of `/v1/completions` or `/v1/chat/completions`."""

    # One for each prompt; a chat has one. Sample `i` of prompt `p` is choice `p * num_samples + i`.
    requests: tuple[inference_pb2.GenerateRequest, ...]
    num_samples: int
    # Path of a field of the service to the field that set it.
    names: Mapping[str, str]
    is_chat: bool
    is_stream: bool
    usage: StreamOptions
    with_token_ids: bool
    # Alternatives of each token of the output, of the prompt; None: no logprobs.
    num_top: int | None
    num_prompt_top: int | None
    # The call of a chat's answer has OpenAI's old form: `function_call`.
    calls_function: bool = False
    # The prompt comes before the output.
    is_echo: bool = False
    # The service makes at least one token; where none was asked for, it is not shown.
    hides_output: bool = False


def completion(values: Mapping[str, object]) -> Wanted:
    """Returns what a request of `/v1/completions` asks for. Raises HttpError, which names the wrong field."""
    body, names = read(Completion, values), dict(COMPLETION)
    num_samples = body.num_samples or 1
    if body.best_of not in (None, num_samples):
        raise invalid("best_of", f"best_of is {body.best_of}; only {num_samples} is supported")
    num_prompt_top, hides_output = body.num_prompt_top, body.echo and body.max_new_tokens == 0
    if body.echo and body.num_top is not None:
        num_prompt_top = max(body.num_top, num_prompt_top or 0)
    options: GenerateOptions = {"max_new_tokens": 1} if hides_output else {}
    shared = _request(body, names, body.num_top, num_prompt_top, options)
    single = isinstance(body.prompt, str) or (bool(body.prompt) and isinstance(body.prompt[0], int))
    prompts = cast(list[str | list[int]], [body.prompt] if single else body.prompt)
    if not prompts:
        raise invalid("prompt", "prompt is empty; at least 1 token is needed")
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompts)} prompts; the limit is {MAX_PROMPTS}")
    requests = list[inference_pb2.GenerateRequest]()
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not prompt:
            name = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            raise invalid(name, f"{name} is empty; at least 1 token is needed")
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(shared)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return Wanted(
        requests=tuple(requests), num_samples=num_samples, names=names, is_chat=False, is_stream=body.stream,
        usage=body.stream_options or _NO_USAGE, with_token_ids=body.with_token_ids, num_top=body.num_top,
        num_prompt_top=num_prompt_top, is_echo=body.echo, hides_output=hides_output,
    )  # fmt: skip


def chat_completion(values: Mapping[str, object]) -> Wanted:
    """Returns what a request of `/v1/chat/completions` asks for. Raises HttpError, which names the wrong field."""
    body, names = read(Chat, values), dict(CHAT)
    options, old, new = GenerateOptions(), body.max_new_tokens, body.max_completion_tokens
    if new is not None:
        if old not in (None, new):
            message = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise invalid("max_completion_tokens", message)
        options["max_new_tokens"], names["stop.max_new_tokens"] = new, "max_completion_tokens"
    if body.num_top is not None and not body.has_logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    num_top = (body.num_top or 0) if body.has_logprobs else None
    request = _request(body, names, num_top, body.num_prompt_top, options)
    request.chat.CopyFrom(chat(body))
    _set_calls(body, request.chat, names)
    return Wanted(
        requests=(request,), num_samples=body.num_samples or 1, names=names, is_chat=True, is_stream=body.stream,
        usage=body.stream_options or _NO_USAGE, with_token_ids=body.with_token_ids, num_top=num_top,
        num_prompt_top=body.num_prompt_top, calls_function=body.functions is not None,
    )  # fmt: skip


def _set_calls(body: Chat, made: chat_pb2.Chat, names: dict[str, str]) -> None:
    """Sets which tools the model calls. `names` learns the names of the old form."""
    choice, several = body.tool_choice, body.parallel_tool_calls
    if body.functions is None:
        if body.function_call is not None:
            raise invalid("function_call", "function_call needs functions")
    else:
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, False):
                raise invalid(
                    name, f"{name} and functions are set; functions is the old form of tools: give one of them"
                )
        made.tools_json.extend(json_text({"type": "function", "function": function}) for function in body.functions)
        choice, several = body.function_call, False
        names |= _OLD_CALLS
    if several is not None:
        made.parallel_tool_calls = several
    if isinstance(choice, str):
        made.tool_choice.mode = chat_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.upper()}")
    elif choice is not None:
        made.tool_choice.name = choice.name if isinstance(choice, ToolName) else choice.function.name


def chat(body: Conversation) -> chat_pb2.Chat:
    """Returns the conversation, its tools and what its template takes. Raises HttpError."""
    if not body.messages:
        raise invalid("messages", "messages is empty; at least 1 message is needed")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other")
    arguments = dict(body.template_args or {})
    # gpt-oss's template and others read it.
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return chat_pb2.Chat(
        messages=_messages(body.messages),
        tools_json=map(json_text, body.tools or ()),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message or False,
        template_args_json=json_text(arguments) if arguments else "",
    )


def _messages(given: Sequence[Message]) -> Iterator[chat_pb2.ChatMessage]:
    """The messages. A call in the old form has no id, and the next result of that form answers it."""
    number = 0
    for idx, message in enumerate(given):
        made = _message(message)
        if message.function_call is not None:
            if message.tool_calls:
                place = f"messages[{idx}].function_call"
                raise invalid(
                    place, f"{place} and tool_calls are set; function_call is their old form: give one of them"
                )
            number += 1
            _add_call(made, f"call{number:05}", message.function_call)
        if message.role == _FUNCTION:
            made.role = "tool"
            if number:
                made.tool_call_id = f"call{number:05}"
        yield made


def _message(given: Message) -> chat_pb2.ChatMessage:
    content = given.refusal if given.content is None else given.content
    parts = [content] if isinstance(content, str) else content or ()
    made = chat_pb2.ChatMessage(
        role=given.role,
        content=[part if isinstance(part, str) else getattr(part, part.type) for part in parts],
        reasoning=given.reasoning_content or given.reasoning or "",
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
    )
    for call in given.tool_calls or ():
        _add_call(made, call.id or "", call.function)
    return made


def _add_call(made: chat_pb2.ChatMessage, call_id: str, function: Function) -> None:
    text = "" if function.arguments is None else json_text(function.arguments)
    made.tool_calls.add(id=call_id, name=function.name, arguments_json=text)


def _request(
    body: Options, names: dict[str, str], num_top: int | None, num_prompt_top: int | None, more: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """A request without its prompt. `names` learns which fields set the constraint and the salt."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    options: dict[str, Any] = {name: value for name, value in vars(body).items() if name in PLACES}
    options |= {**_constraint(body, names), **more}
    if body.user is not None:
        # A user has pages of its own, inside those of the caller's tenant: the service adds the tenant to every salt. A
        # user may be longer than a salt, and must not be able to take another's: so both are hashed.
        hashed = hashlib.sha256(json.dumps([body.user, body.cache_salt]).encode()).hexdigest()
        options["cache_salt"], names["cache.salt"] = f"user-{hashed}", "user"
    if num_top is not None or num_prompt_top is not None:
        # The service has one number of alternatives for the prompt and the output.
        options |= {"logprobs": max(num_top or 0, num_prompt_top or 0), "logprob_pieces": True}
    if num_prompt_top is not None:
        options["prompt_logprobs_start"] = 0
    # Without them a message is smaller; with them, tokens can be counted before the end.
    in_each = (body.stream_options or _NO_USAGE).continuous_usage_stats
    options["want_token_ids"] = body.with_token_ids or num_top is not None or in_each
    return generate_request("", **cast(GenerateOptions, options))


def _constraint(body: Options, names: dict[str, str]) -> dict[str, object]:
    """What the output may be, as keywords of the client. The service compiles it, and refuses what it cannot."""
    # By the field that asks for it: keyword and value.
    given_ones = {name: (keyword, getattr(body, name)) for name, keyword in _GUIDED.items()}
    if (given := body.response_format) is not None:
        if given.type == "json_object":
            given_ones["response_format"] = ("json_object", True)
        if (given.type == "json_schema") != (given.json_schema is not None):
            message = "is missing" if given.json_schema is None else f"is set, and the type is {given.type}"
            raise invalid(_RESPONSE, f"{_RESPONSE} {message}")
        if given.json_schema is not None:
            given_ones[f"{_RESPONSE}.schema"] = ("json_schema", given.json_schema.json_schema)
    for keyword, field in type(body.structured_outputs).model_fields.items() if body.structured_outputs else ():
        value = getattr(body.structured_outputs, keyword)
        given_ones[f"structured_outputs.{field.alias or keyword}"] = (
            keyword,
            (value or None) if keyword == "json_object" else value,
        )
    asked = {name: keyword for name, (keyword, value) in given_ones.items() if value is not None}
    if len(asked) > 1:
        raise invalid([*asked][1], f"{' and '.join(asked)} are set; a request has one constraint")
    for name, keyword in asked.items():
        names |= dict.fromkeys(("constraint", *CONSTRAINT_FIELDS), name.removesuffix(".json_schema.schema"))
        names["constraint.json_schema"] = name
        return {keyword: json_text(given_ones[name][1]) if keyword == "json_schema" else given_ones[name][1]}
    return {}
