"""Decides which schemas of a chat's tools its answer must match. Owns the warnings about the others.

A strict tool whose schema cannot be enforced is refused by name. Any other tool never fails a request: then its
arguments are any JSON object. The grammar is tried with all schemas first; if it is refused, each tool by itself.
"""

import functools
from collections.abc import Awaitable, Callable, Collection

from scheduler_svc.frontend.chat.answer_grammar import (
    UNKNOWN_CALLS,
    AnswerFormat,
    UnknownFormatError,
    WriteSchema,
    answer_grammar,
    exact_tools,
    is_free,
)
from scheduler_svc.frontend.chat.conversation import Calls, Choice, Conversation, Tool
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.constraints.grammar import WrittenSchemas, within_limit
from scheduler_svc.frontend.constraints.limits import GrammarError
from scheduler_svc.frontend.constraints.trials import Verdict
from scheduler_svc.frontend.sizes import wrong

# Killed trials of one chat's tools, seconds each. After them the other tools are not tried.
MAX_KILLED = 2
# A caller may send 128 tools, and the core keeps what a stream begins with.
MAX_WARNINGS, MAX_REASON_CHARS = 8, 200
# How an error names the whole grammar.
ANSWER = "the answer"


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
        self._content = None if self._choice.is_forced else content
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
            raise wrong("chat.tool_choice", f"or a strict tool needs a grammar, and {error}") from None


class ToolSchemas:
    """The schemas of one answer's tools. `settle` once."""

    def __init__(
        self, answer: AnswerGrammar, write: WrittenSchemas, judge: Callable[[str], Awaitable[Verdict]]
    ) -> None:
        """`write` has the schemas of the answer, and `judge` tries a grammar."""
        self._answer, self._write, self._judge = answer, write, judge
        # Why arguments of a tool are any JSON object, by its name.
        self._loose = dict[str, str]()

    async def settle(self) -> str | None:
        """The grammar with all schemas that can be enforced, None if any text is an answer. Raises GrammarError.

        It may still be refused, but not for a tool. The error is that of a strict tool, with the field of its schema.
        """
        for tool in self._answer.exact_tools:
            if why := self._answer.why_loose(tool):
                self._loosen(tool, why)
                continue
            try:
                self._write(tool.parameters, self._answer.field(tool) if tool.is_strict else "parameters")
            except GrammarError as error:
                self._loosen(tool, str(error), error.field)
        while True:
            grammar, verdict = await self._tried(lambda: self._answer.whole(self._loose))
            if not verdict.refusal or not await self._loosen_more(verdict.refusal):
                break
        if grammar is None and verdict.refusal:
            raise GrammarError(verdict.refusal)
        return grammar

    def warnings(self) -> tuple[str, ...]:
        """What the caller should know, a sentence each."""
        words = "is not enforced, so its arguments are any JSON object"
        shown = list(self._loose.items())[:MAX_WARNINGS]
        found = [f"the schema of tool {name!r} {words}: {why[:MAX_REASON_CHARS]}" for name, why in shown]
        if (num_others := len(self._loose) - len(found)) > 0:
            found.append(f"the schemas of {num_others} other tools are not enforced either")
        return tuple(found)

    def _loosen(self, tool: Tool, why: str, field: str = "") -> None:
        if tool.is_strict:
            message = f"tool {tool.name!r} is strict, and its schema is not supported: {why}"
            raise GrammarError(message, field or self._answer.field(tool))
        self._loose[tool.name] = why

    async def _loosen_more(self, why: str) -> bool:
        """Takes back the schemas that are the cause of a refusal. Returns whether there are any."""
        held = [tool for tool in self._answer.exact_tools if tool.name not in self._loose]
        num_loose, num_killed = len(self._loose), 0
        for tool in held:
            if num_killed == MAX_KILLED:
                break
            _, verdict = await self._tried(functools.partial(self._answer.alone, tool))
            num_killed += verdict.was_killed
            if verdict.refusal:
                self._loosen(tool, verdict.refusal)
        if len(self._loose) == num_loose or num_killed == MAX_KILLED:
            # Each may be good by itself and all together too large.
            self._loose |= {tool.name: why for tool in held if not tool.is_strict and tool.name not in self._loose}
        return len(self._loose) > num_loose

    async def _tried(self, make: Callable[[], str | None]) -> tuple[str | None, Verdict]:
        """A grammar and its verdict; None if any text is an answer, or if it cannot be made."""
        grammar = None
        try:
            if (grammar := make()) is None:
                return None, Verdict()
            within_limit(ANSWER, grammar)
        except GrammarError as error:
            return grammar, Verdict(refusal=str(error))
        return grammar, await self._judge(grammar)
