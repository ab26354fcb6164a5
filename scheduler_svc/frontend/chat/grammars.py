"""Owns the grammar of one chat's answer: what its tools, its tool_choice and its constraint demand. Pure."""

from collections.abc import Callable, Mapping

from scheduler_svc.frontend.chat.conversation import Conversation
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.tools.grammar import AnswerFormat, answer_grammar, is_free
from scheduler_svc.frontend.tools.tool import Calls


def chat_grammar(
    chat: ServedChat,
    conversation: Conversation,
    rendered: Rendered,
    *,
    content: str | None,
    json_options: Mapping[str, object],
    check_schema: Callable[[str, Mapping[str, object]], str],
) -> str | None:
    """Returns the grammar of an answer, or None if it may be any text. Raises Refusal.

    `content` is the grammar of the request's constraint. `json_options` are the keys that llguidance takes from the
    root of a schema, and `check_schema(field, schema)` says in one sentence why a schema is not supported, or nothing.
    """
    choice, form = conversation.choice, chat.form
    if content is not None and choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE):
        message = "chat.tool_choice demands a call of a tool, and constraint says what the content is; give one of them"
        raise status.invalid("constraint", message)
    if is_free(choice, content):
        return None
    names = [tool["function"]["name"] for tool in conversation.tools]
    for tool in choice.tools:
        field = f"chat.tools_json[{names.index(tool.name)}].function.parameters"
        if tool.is_strict and (why := check_schema(field, tool.parameters)):
            raise status.invalid(field, f"tool {tool.name!r} is strict, and its schema is not supported: {why}")
    assert chat.renderer is not None
    written = AnswerFormat(
        calls=None if form is None else form.calls,
        reasoning=None if form is None else form.reasoning,
        content_begin="" if form is None else form.content_begin,
        marks=chat.renderer.marks,
        json_options=json_options,
    )

    def supports(schema: Mapping[str, object]) -> bool:
        return not check_schema("", schema)

    try:
        return answer_grammar(choice, written, chat.prefix(rendered), content=content, supports=supports)
    except ValueError as error:
        raise status.invalid(
            "chat.tool_choice", f"chat.tool_choice or a strict tool needs a grammar, and {error}"
        ) from None
