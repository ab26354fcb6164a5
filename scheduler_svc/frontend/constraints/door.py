"""Owns the way of a constraint from a request to the core's Submit: limits, grammar, trial. One for the process."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.v1 import inference_pb2

from scheduler_svc.frontend.chat.conversation import Conversation
from scheduler_svc.frontend.chat.grammars import AnswerGrammar
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.constraints.grammar import (
    WrittenSchemas,
    check_combination,
    grammar_of,
    hash_of,
    within_limit,
)
from scheduler_svc.frontend.constraints.limits import GrammarError, UnsupportedError
from scheduler_svc.frontend.constraints.tool_schemas import ANSWER, ToolSchemas
from scheduler_svc.frontend.constraints.trial_process import TrialProcess, Verdict
from scheduler_svc.frontend.constraints.trials import Trials
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.metrics.front_meter import FrontMeter
from tandem_contract.grammars import COMPILE_SECONDS

# A larger constraint is checked in a thread, so that the event loop goes on.
LONG_BYTES = 4_096


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

    def __init__(self, meter: FrontMeter | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`meter`: None without a metrics page."""
        self._meter = meter
        self._clock = clock
        self._trials: Trials | None = None
        self._key: tuple[bytes, int, frozenset[int]] | None = None

    async def accept(self, request: inference_pb2.GenerateRequest, model: Model, tenant: str) -> AcceptedConstraint:
        """Returns the grammar of a request's constraint. Raises Refusal."""
        if not request.HasField("constraint"):
            return NO_CONSTRAINT
        grammar = await self._grammar(request, model)
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
        content = await self._grammar(request, model) if request.HasField("constraint") else None
        write = WrittenSchemas(ANSWER)
        answer = AnswerGrammar(model.chat, conversation, rendered, content=content, write_schema=write)
        kind = f"constraint.{request.constraint.WhichOneof('kind')}"
        if content is not None and not answer.has_content:
            # It is checked all the same.
            await self.judge(kind, content, model, tenant)
        if answer.is_free:
            return NO_CONSTRAINT
        self.check_served(model)
        try:
            check_combination(request, "constraint" if answer.has_content else "chat.tool_choice")
        except GrammarError as error:
            raise self._refused(_reason(error), str(error)) from None
        field = kind if answer.has_content else "chat.tools_json"
        tools = ToolSchemas(answer, write, lambda grammar: self._verdict(field, grammar, model, tenant))
        try:
            grammar = await tools.settle()
            if grammar is None:
                return NO_CONSTRAINT
            within_limit(field, grammar)
        except GrammarError as error:
            raise self._refused(_reason(error), str(error), error.field or field) from None
        return dataclasses.replace(await self.judge(field, grammar, model, tenant), warnings=tools.warnings())

    async def _grammar(self, request: inference_pb2.GenerateRequest, model: Model) -> str:
        """The grammar of a request's constraint, without a trial. Raises Refusal."""
        self.check_served(model)
        try:
            check_combination(request, "constraint")
            if request.constraint.ByteSize() > LONG_BYTES:
                return await asyncio.to_thread(grammar_of, request.constraint)
            return grammar_of(request.constraint)
        except GrammarError as error:
            raise self._refused(_reason(error), str(error), error.field or "constraint") from None

    def check_served(self, model: Model) -> None:
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
        """Ends the process."""
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
            self._trials, self._key = Trials(process, clock=self._clock, on_end=self._tried), key
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


def _reason(error: GrammarError) -> str:
    return "keyword" if isinstance(error, UnsupportedError) else "grammar"
