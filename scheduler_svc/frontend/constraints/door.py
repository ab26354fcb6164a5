"""Owns the way of a constraint from a request to the core's Submit: limits, grammar, trial. One for the process."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.v1 import inference_pb2

from scheduler_svc.frontend.constraints.grammar import check_combination, grammar_of, hash_of
from scheduler_svc.frontend.constraints.limits import GrammarError
from scheduler_svc.frontend.constraints.trial_process import TRIAL_SECONDS, TrialProcess
from scheduler_svc.frontend.constraints.trials import TrialCounts, Trials
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status

# A larger constraint is checked in a thread, so that the event loop goes on.
LONG_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class AcceptedConstraint:
    """The fields of a Submit; both empty without a constraint."""

    source: bytes = b""
    hash: bytes = b""


NO_CONSTRAINT = AcceptedConstraint()


class ConstraintDoor:
    """Takes or refuses constraints. Its process starts with the first new one, and again if the model changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = TrialCounts()
        self._clock = clock
        self._trials: Trials | None = None
        self._key: tuple[bytes, int, frozenset[int]] | None = None

    async def accept(self, request: inference_pb2.GenerateRequest, model: Model, tenant: str) -> AcceptedConstraint:
        """Returns the grammar of a request's constraint. Raises Refusal."""
        if not request.HasField("constraint"):
            return NO_CONSTRAINT
        self.check_served(model)
        try:
            check_combination(request)
            if request.constraint.ByteSize() > LONG_BYTES:
                grammar = await asyncio.to_thread(grammar_of, request.constraint)
            else:
                grammar = grammar_of(request.constraint)
        except GrammarError as error:
            raise self._refused(str(error)) from None
        kind = request.constraint.WhichOneof("kind")
        return await self.judge(f"constraint.{kind}", grammar, model, tenant)

    def check_served(self, model: Model) -> None:
        """Raises Refusal if the service takes no constraints."""
        if why := model.info.constraint_refusal:
            raise self._refused(why)

    async def judge(self, field: str, grammar: str, model: Model, tenant: str) -> AcceptedConstraint:
        """Tries a grammar, unless its verdict is known. `field` is named in the refusal. Raises Refusal."""
        accepted = AcceptedConstraint(grammar.encode(), hash_of(grammar))
        verdict = await self._trials_of(model).judge(accepted.hash, grammar, tenant)
        if verdict.is_unknown:
            why = verdict.refusal or "the machine was too busy to try the constraint"
            raise status.overloaded(f"{field}: {why}; the limit is {TRIAL_SECONDS:g} s", TRIAL_SECONDS)
        if verdict.refusal:
            raise self._refused(f"{field}: {verdict.refusal}")
        return accepted

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
            self._trials, self._key = Trials(process, self.counts, clock=self._clock), key
        return self._trials

    def _refused(self, message: str) -> status.Refusal:
        self.counts.refused += 1
        return status.invalid("constraint", message)
