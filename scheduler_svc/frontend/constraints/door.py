"""Owns the way of a constraint from a request to the core's Submit: limits, grammar, trial. One for the process.

For a chat, also the schemas of its tools that the answer must match, and warnings about the others. A strict tool with
a schema that cannot be enforced is refused by name. Any other tool never fails a request: then its arguments are any
JSON object. The grammar is tried with all schemas first; if it is refused, each tool by itself.
"""

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.v1 import inference_pb2

from scheduler_svc.frontend.chat.conversation import Calls, Choice, Conversation, Tool
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.constraints.answer_grammar import (
    UNKNOWN_CALLS,
    AnswerFormat,
    answer_grammar,
    exact_tools,
    is_free,
    why_not_held,
)
from scheduler_svc.frontend.constraints.grammar import (
    ANSWER,
    WrittenSchemas,
    check_combination,
    grammar_of,
    hash_of,
    within_limit,
)
from scheduler_svc.frontend.constraints.limits import GrammarError, UnsupportedError
from scheduler_svc.frontend.constraints.trials import TrialProcess, Trials, Verdict
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.metrics.front_meter import FrontMeter
from tandem_contract.grammars import COMPILE_SECONDS
from tandem_contract.plural import numbered

# Killed trials of one chat's tools, seconds each. After them the other tools are not tried.
MAX_KILLED = 2
# A caller may send 128 tools, and the core keeps what a stream begins with.
MAX_WARNINGS, MAX_REASON_CHARS = 8, 200
# Larger constraints and tools are checked in the threads of long texts, so that the event loop goes on: 1 ms of work.
LONG_BYTES = 4_096
Result = TypeVar("Result")
# Runs work here or in a thread, and returns its result.
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
# Makes a grammar and tries it.
Tried = Callable[[Callable[[], str | None]], Awaitable[tuple[str | None, Verdict]]]


async def _run(work: Callable[[], Result], num_bytes: int, model: Model, tenant: str) -> Result:
    """The result of work on a text of the caller. Raises Refusal if too many of them wait."""
    if num_bytes <= LONG_BYTES:
        return work()
    assert model.tokenizer is not None, "without a tokenizer no constraint is served"
    return await model.tokenizer.threads.run(tenant, work)


class AnswerGrammar:
    """The grammar of one answer, with the schemas of more or fewer of its tools."""

    def __init__(
        self, chat: ServedChat, conversation: Conversation, rendered: Rendered, *, content: str | None
    ) -> None:
        """`content` is the grammar of the request's constraint."""
        self._chat, self._rendered, self._write = chat, rendered, WrittenSchemas()
        self._choice, self._tools = conversation.choice, conversation.tools
        assert chat.renderer is not None
        self._format = AnswerFormat(
            calls=None if chat.form is None else chat.form.calls,
            reasoning=chat.reasoning(conversation),
            content_begin="" if chat.form is None else chat.form.content_begin,
            marks=chat.renderer.marks,
            write_schema=self._write,
        )
        # Calls that the caller demands leave no place for content.
        self._content = None if self._choice.is_forced else content
        self.has_content = self._content is not None
        # Every text is an answer. Most chats are like that, so nothing else is made for them.
        self.is_free = is_free(self._choice, self._content)
        # Their arguments match their schemas.
        self.exact_tools = () if self.is_free else exact_tools(self._choice)
        # Why arguments of a tool are any JSON object, by its name.
        self._loose = dict[str, str]()

    def field(self, tool: Tool) -> str:
        names = [schema["function"]["name"] for schema in self._tools]
        return f"chat.tools_json[{names.index(tool.name)}].function.parameters"

    def why_loose(self, tool: Tool) -> str:
        """Why no arguments of a tool can be held to its schema, in one sentence; empty if they can."""
        calls = self._format.calls
        if tool.why_loose or calls is None:
            return tool.why_loose or UNKNOWN_CALLS
        why = calls.why_not(tool.parameters)
        if why or calls.tagged is None:
            return why
        return why_not_held(tool.parameters, is_strict=tool.is_strict)

    def whole(self, loose: Collection[str]) -> str | None:
        """The grammar of the answer, None if it may be any text. Arguments of the tools in `loose` are any object.

        Raises Refusal.
        """
        prefix = self._chat.prefix(self._rendered)
        return answer_grammar(self._choice, self._format, prefix, content=self._content, loose=loose)

    async def settle(self, run: Run, judge: Callable[[str], Awaitable[Verdict]]) -> str | None:
        """The grammar with all schemas that can be enforced, None if any text is an answer. Raises GrammarError.

        `run` does what may take long, and `judge` tries a grammar. The grammar may still be refused, but not for a
        tool. The error is that of a strict tool, with the field of its schema.
        """

        async def tried(make: Callable[[], str | None]) -> tuple[str | None, Verdict]:
            """A grammar and its verdict; None if any text is an answer, or if it cannot be made."""
            grammar = None
            try:
                if (grammar := await run(make)) is None:
                    return None, Verdict()
                within_limit(ANSWER, grammar)
            except GrammarError as error:
                return grammar, Verdict(refusal=str(error))
            return grammar, await judge(grammar)

        await run(self._write_all)
        while True:
            grammar, verdict = await tried(lambda: self.whole(self._loose))
            if not verdict.refusal or not await self._loosen_more(verdict.refusal, tried):
                break
        if grammar is None and verdict.refusal:
            raise GrammarError(verdict.refusal)
        return grammar

    def warnings(self) -> tuple[str, ...]:
        """What the caller should know, a sentence each."""
        words = "is not enforced, so its arguments are any JSON object"
        shown = list(self._loose.items())[:MAX_WARNINGS]
        sentences = [f"the schema of tool {name!r} {words}: {why[:MAX_REASON_CHARS]}" for name, why in shown]
        if (num_others := len(self._loose) - len(sentences)) > 0:
            sentences.append(f"the schemas of {numbered(num_others, 'other tool')} are not enforced either")
        return tuple(sentences)

    def _write_all(self) -> None:
        for tool in self.exact_tools:
            if why := self.why_loose(tool):
                self._loosen(tool, why)
                continue
            try:
                self._write(tool.parameters, self.field(tool) if tool.is_strict else "parameters")
            except GrammarError as error:
                self._loosen(tool, str(error), error.field)

    def _loosen(self, tool: Tool, why: str, field: str = "") -> None:
        if tool.is_strict:
            message = f"tool {tool.name!r} is strict, and its schema is not supported: {why}"
            raise GrammarError(message, field or self.field(tool))
        self._loose[tool.name] = why

    async def _loosen_more(self, why: str, tried: Tried) -> bool:
        """Takes back the schemas that are the cause of a refusal. Returns whether there are any."""
        held = [tool for tool in self.exact_tools if tool.name not in self._loose]
        num_loose, num_killed = len(self._loose), 0
        for tool in held:
            if num_killed == MAX_KILLED:
                break
            alone = Choice((tool,), Calls.EXACTLY_ONE)
            _, verdict = await tried(functools.partial(answer_grammar, alone, self._format, "", content=None))
            num_killed += verdict.was_killed
            if verdict.refusal:
                self._loosen(tool, verdict.refusal)
        if len(self._loose) == num_loose or num_killed == MAX_KILLED:
            # Each may be good by itself and all together too large.
            self._loose |= {tool.name: why for tool in held if not tool.is_strict and tool.name not in self._loose}
        return len(self._loose) > num_loose


@dataclass(frozen=True, slots=True)
class AcceptedConstraint:
    """The fields of a Submit, empty without a constraint."""

    source: bytes = b""
    hash: bytes = b""
    # What the caller should know of an accepted request, one sentence each.
    warnings: tuple[str, ...] = ()


NO_CONSTRAINT = AcceptedConstraint()


class ConstraintDoor:
    """Takes or refuses constraints. Its process starts with the first new one, and again if the model changes."""

    def __init__(self, meter: FrontMeter | None = None) -> None:
        """`meter`: None without a metrics page."""
        self._meter = meter
        self._trials: Trials | None = None
        self._key: tuple[bytes, int, frozenset[int]] | None = None

    async def accept(self, request: inference_pb2.GenerateRequest, model: Model, tenant: str) -> AcceptedConstraint:
        """Returns the grammar of a request's constraint. Raises Refusal."""
        if not request.HasField("constraint"):
            return NO_CONSTRAINT
        grammar = await self._grammar(request, model, tenant)
        return await self.judge(f"constraint.{request.constraint.WhichOneof('kind')}", grammar, model, tenant)

    async def accept_chat(
        self,
        request: inference_pb2.GenerateRequest,
        conversation: Conversation,
        rendered: Rendered,
        model: Model,
        tenant: str,
    ) -> AcceptedConstraint:
        """Returns the grammar of a chat's answer: of its constraint, tools and tool_choice. Raises Refusal."""
        content = await self._grammar(request, model, tenant) if request.HasField("constraint") else None
        answer = AnswerGrammar(model.chat, conversation, rendered, content=content)
        kind = f"constraint.{request.constraint.WhichOneof('kind')}"
        if content is not None and not answer.has_content:
            # It is checked all the same.
            await self.judge(kind, content, model, tenant)
        if answer.is_free:
            return NO_CONSTRAINT
        self._check_served(model)
        try:
            check_combination(request, "constraint" if answer.has_content else "chat.tool_choice")
        except GrammarError as error:
            raise self._not_made(error, "constraint") from None
        field = kind if answer.has_content else "chat.tools_json"
        num_bytes = sum(map(len, request.chat.tools_json))
        run = functools.partial(_run, num_bytes=num_bytes, model=model, tenant=tenant)
        try:
            grammar = await answer.settle(run, lambda grammar: self._verdict(field, grammar, model, tenant))
            if grammar is None:
                return NO_CONSTRAINT
            within_limit(field, grammar)
        except GrammarError as error:
            raise self._not_made(error, field) from None
        return dataclasses.replace(await self.judge(field, grammar, model, tenant), warnings=answer.warnings())

    async def _grammar(self, request: inference_pb2.GenerateRequest, model: Model, tenant: str) -> str:
        """The grammar of a request's constraint, without a trial. Raises Refusal."""
        self._check_served(model)
        try:
            check_combination(request, "constraint")
            work = functools.partial(grammar_of, request.constraint)
            return await _run(work, request.constraint.ByteSize(), model, tenant)
        except GrammarError as error:
            raise self._not_made(error, "constraint") from None

    def _check_served(self, model: Model) -> None:
        """Raises Refusal if the service takes no constraints."""
        if why := model.info.constraint_refusal:
            raise self._refused("unserved", why)

    async def judge(self, field: str, grammar: str, model: Model, tenant: str) -> AcceptedConstraint:
        """Tries a grammar, unless its verdict is known. `field` is named in the refusal. Raises Refusal."""
        verdict = await self._verdict(field, grammar, model, tenant)
        if verdict.refusal:
            reason = "killed" if verdict.was_killed else "trial"
            raise self._refused(reason, f"{field}: {verdict.refusal}", field)
        return AcceptedConstraint(grammar.encode(), hash_of(grammar))

    async def _verdict(self, field: str, grammar: str, model: Model, tenant: str) -> Verdict:
        """The verdict of a trial. Raises Refusal if it cannot be known now."""
        try:
            verdict = await self._trials_of(model).judge(hash_of(grammar), grammar, tenant)
        except status.Refusal:
            self._count("waiting")
            raise
        if verdict.is_unknown:
            self._count("busy")
            raise status.overloaded(f"{field}: {verdict.refusal}", COMPILE_SECONDS)
        return verdict

    def close(self) -> None:
        if self._trials is not None:
            self._trials.close()
            self._trials = None

    def _trials_of(self, model: Model) -> Trials:
        key = model.tokenizer_digest, model.info.vocab_size, model.eos_token_ids
        if self._trials is None or self._key != key:
            self.close()
            process = TrialProcess(
                model.tokenizer_json, vocab_size=model.info.vocab_size, eos_token_ids=sorted(model.eos_token_ids)
            )
            self._trials, self._key = Trials(process, clock=time.monotonic, on_end=self._tried), key
        return self._trials

    def _tried(self, verdict: Verdict) -> None:
        if self._meter is not None:
            self._meter.trial_ended(was_killed=verdict.was_killed)

    def _count(self, reason: str) -> None:
        """Counts a refusal for one of `catalogue.CONSTRAINT_REASONS`."""
        if self._meter is not None:
            self._meter.constraint_refused(reason)

    def _refused(self, reason: str, message: str, field: str = "constraint") -> status.Refusal:
        self._count(reason)
        return status.invalid(field, message)

    def _not_made(self, error: GrammarError, field: str) -> status.Refusal:
        reason = "keyword" if isinstance(error, UnsupportedError) else "grammar"
        return self._refused(reason, str(error), error.field or field)
