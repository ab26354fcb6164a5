"""Owns the grammar of one chat's answer: what its tools, its tool_choice and its constraint demand. Pure."""

from collections.abc import Collection

from scheduler_svc.frontend.chat.conversation import Conversation
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.tools.call_rules import WriteSchema
from scheduler_svc.frontend.tools.grammar import (
    UNKNOWN_CALLS,
    AnswerFormat,
    UnknownFormatError,
    answer_grammar,
    exact_tools,
    is_free,
)
from scheduler_svc.frontend.tools.tool import Calls, Choice, Tool


class AnswerGrammar:
    """The grammar of one answer, with the schemas of more or fewer of its tools."""

    def __init__(
        self,
        chat: ServedChat,
        conversation: Conversation,
        rendered: Rendered,
        *,
        content: str | None,
        write_schema: WriteSchema,
    ) -> None:
        """`content` is the grammar of the request's constraint."""
        self._chat, self._rendered, self._write = chat, rendered, write_schema
        self._choice, self._tools = conversation.choice, conversation.tools
        self._reasoning = chat.reasoning(conversation)
        # Calls that the caller demands leave no place for content.
        self._content = None if self._choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE) else content
        self.has_content = self._content is not None
        # Every text is an answer. Most chats are like that, so nothing else is made for them.
        self.is_free = is_free(self._choice, self._content)
        # Their arguments match their schemas.
        self.exact_tools = () if self.is_free else exact_tools(self._choice)

    def field(self, tool: Tool) -> str:
        """The field of a tool's schema."""
        names = [each["function"]["name"] for each in self._tools]
        return f"chat.tools_json[{names.index(tool.name)}].function.parameters"

    def why_loose(self, tool: Tool) -> str:
        """Why no arguments of a tool can be held to its schema, in one sentence; empty if they can."""
        calls = None if self._chat.form is None else self._chat.form.calls
        return tool.why_loose or (UNKNOWN_CALLS if calls is None else calls.why_not(tool.parameters))

    def whole(self, loose: Collection[str]) -> str | None:
        """The grammar of the answer, None if it may be any text. Arguments of the tools in `loose` are any object.

        Raises Refusal.
        """
        return self._of(self._choice, self._content, self._chat.prefix(self._rendered), loose)

    def alone(self, tool: Tool) -> str:
        """The grammar of one call of this tool. Raises Refusal."""
        made = self._of(Choice((tool,), Calls.EXACTLY_ONE), None, "", ())
        assert made is not None
        return made

    def _of(self, choice: Choice, content: str | None, prefix: str, loose: Collection[str]) -> str | None:
        form, renderer = self._chat.form, self._chat.renderer
        assert renderer is not None
        written = AnswerFormat(
            calls=None if form is None else form.calls,
            reasoning=self._reasoning,
            content_begin="" if form is None else form.content_begin,
            marks=renderer.marks,
            write_schema=self._write,
        )
        try:
            return answer_grammar(choice, written, prefix, content=content, loose=loose)
        except UnknownFormatError as error:
            raise status.invalid(
                "chat.tool_choice", f"chat.tool_choice or a strict tool needs a grammar, and {error}"
            ) from None
