"""Reads a request of `/v1/chat/completions`. Pure: JSON in, one call of the service out."""

from typing import cast

from tandem.v1 import chat_pb2, inference_pb2

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.openai import names
from tandem_client.gateway.openai.completions import set_logprobs
from tandem_client.gateway.openai.constraint import json_text
from tandem_client.gateway.openai.fields import Fields, object_of, shown, text_of, wrong
from tandem_client.gateway.openai.messages import add_message
from tandem_client.gateway.openai.options import set_options, streaming
from tandem_client.gateway.openai.wanted import Wanted

_MODES = {
    "auto": chat_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": chat_pb2.TOOL_CHOICE_MODE_NONE,
    "required": chat_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_CHOICE = "tool_choice"


def chat_completion(values: dict[str, object]) -> Wanted:
    """Returns what the request asks for. Raises HttpError, which names the wrong field."""
    fields, known = Fields(values), dict(names.CHAT)
    request = inference_pb2.GenerateRequest()
    set_options(fields, request, known)
    stream = streaming(fields)
    _set_length(fields, request, known)
    has_logprobs, num_top = fields.flag("logprobs"), fields.integer("top_logprobs")
    if num_top is not None and not has_logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    num_top = (num_top or 0) if has_logprobs else None
    num_prompt_top = fields.integer("prompt_logprobs")
    set_logprobs(request.output, num_top, num_prompt_top)
    with_token_ids = fields.flag("return_token_ids") or False
    request.output.want_token_ids = with_token_ids or num_top is not None or stream.in_each
    set_chat(fields, request.chat)
    if (parallel := fields.flag("parallel_tool_calls")) is not None:
        request.chat.parallel_tool_calls = parallel
    _set_choice(fields.any(_CHOICE), request.chat)
    fields.same_as_unset(names.OF_CHATS)
    fields.drop(*names.IGNORED)
    fields.end()
    return Wanted(
        requests=(request,),
        num_samples=request.sampling.num_samples or 1,
        names=known,
        is_chat=True,
        is_stream=stream.is_stream,
        with_usage=stream.at_end,
        with_every_usage=stream.in_each,
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        is_echo=False,
        hides_output=False,
        with_token_ids=with_token_ids,
    )


def set_chat(fields: Fields, chat: chat_pb2.Chat) -> None:
    """Sets the conversation, its tools and what its template takes."""
    messages = fields.items("messages")
    if messages is None:
        raise fields.required("messages")
    if not messages:
        raise invalid("messages", "messages is empty; at least 1 message is needed")
    for i, message in enumerate(messages):
        add_message(message, f"messages[{i}]", chat)
    for i, tool in enumerate(fields.items("tools") or ()):
        object_of(tool, f"tools[{i}]")
        chat.tools_json.append(json_text(tool))
    if (begins := fields.flag("add_generation_prompt")) is not None:
        chat.add_generation_prompt = begins
    if fields.flag("continue_final_message"):
        chat.continue_final_message = True
        if chat.add_generation_prompt and chat.HasField("add_generation_prompt"):
            raise invalid(
                "add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other"
            )
    arguments: object = fields.any("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise wrong("chat_template_kwargs", arguments, "an object")
    given = dict(cast(dict[str, object], arguments))
    # gpt-oss's template and others read it.
    if (effort := fields.text("reasoning_effort")) is not None:
        given.setdefault("reasoning_effort", effort)
    if given:
        chat.template_args_json = json_text(given)


def _set_length(fields: Fields, request: inference_pb2.GenerateRequest, known: dict[str, str]) -> None:
    """`max_completion_tokens` is the new name of `max_tokens`."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        message = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
        raise invalid("max_completion_tokens", message)
    if new is not None:
        known["stop.max_new_tokens"] = "max_completion_tokens"
    most = old if new is None else new
    if most is not None:
        request.stop.max_new_tokens = most


def _set_choice(choice: object, chat: chat_pb2.Chat) -> None:
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in _MODES:
            raise invalid(_CHOICE, f"{_CHOICE} is {shown(choice)}; it must be {', '.join(_MODES)} or a function's name")
        chat.tool_choice.mode = _MODES[choice]
        return
    fields = object_of(choice, _CHOICE)
    if (kind := fields.text("type")) != "function":
        raise invalid(f"{_CHOICE}.type", f"{_CHOICE}.type is {shown(kind)}; it must be function")
    function = fields.inner("function")
    if function is None:
        raise fields.required("function")
    name = function.any("name")
    chat.tool_choice.name = text_of(name, function.name("name"))
    function.end()
    fields.end()
