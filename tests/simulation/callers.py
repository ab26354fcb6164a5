"""The streams of an episode: each request, the output its caller received, and the checks of every answer.

Owns every stream. Knows nothing of workers, pages or plans.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.rigs.oracle import Reason
from tests.rigs.resources import ADAPTER, source_of
from tests.scheduler_svc.core.stream import Stream, streams_in
from tests.scheduler_svc.core.world import OWN_ENDS


@dataclass(slots=True, kw_only=True)
class Caller(Stream):
    """One stream. `gone`: its caller has disconnected. `kept`: the tokens before a stop string, if one matched."""

    arrived_at: float
    first_at: float | None = None
    gone: bool = False
    kept: int | None = None
    lone_deaths: Counter[int] = field(default_factory=Counter[int])
    """How many deaths and failed steps met it alone, by its number of output tokens."""
    may_fail: bool = False
    """True if a fault of this request or its worker may end the stream as INTERNAL."""

    @property
    def live(self) -> bool:
        """True if the stream was admitted and still awaits its terminal answer."""
        return self.admitted and self.end is None and not self.gone

    @property
    def frontend(self) -> str:
        """The front end that the caller is connected to."""
        return self.submit.frontend

    @property
    def stream(self) -> int:
        """The stream's number at its front end."""
        return self.submit.stream + self.sample_idx

    def history(self) -> list[int]:
        """Prompt and output so far, the start of a follow-up prompt."""
        return [*self.submit.prompt.tolist(), *self.tokens]


class Callers:
    """All streams by front end and number."""

    def __init__(self, shape: Shape, *, plans_in_flight: int) -> None:
        self.by_key: dict[tuple[str, int], Caller] = {}
        self.num_delivered = 0
        self._num_streams = 0
        self._by_id: dict[str, list[Caller]] = {}
        self.all: list[Caller] = []
        """In order of arrival."""
        # A superset of the live streams, because `live` is called often.
        self._pending: list[Caller] = []
        self._shape = shape
        self._plans_in_flight = plans_in_flight

    def next_stream(self, count: int = 0) -> int:
        """Returns the first of unused stream numbers, and takes `count` of them."""
        first, self._num_streams = self._num_streams, self._num_streams + count
        return first

    def of_request(self, request_id: str) -> list[Caller]:
        """Returns the streams of a request, in the order of its samples."""
        return self._by_id[request_id]

    def move(self, caller: Caller, frontend: str, first_stream: int) -> None:
        """Gives a stream another reader."""
        del self.by_key[caller.frontend, caller.stream]
        caller.submit = replace(caller.submit, frontend=frontend, stream=first_stream)
        self.by_key[caller.frontend, caller.stream] = caller

    def add(self, number: int, caller: Caller) -> None:
        """Registers a stream before its request is submitted."""
        self.by_key[caller.frontend, number] = caller
        self._num_streams += 1
        self._by_id.setdefault(caller.submit.request_id, []).append(caller)
        self.all.append(caller)
        self._pending.append(caller)

    def recent(self, count: int) -> list[Caller]:
        """The `count` streams submitted last."""
        return self.all[-count:]

    def siblings(self, caller: Caller) -> list[Caller]:
        """All samples of this stream's request."""
        return [self.by_key[caller.frontend, number] for number in caller.submit.streams]

    def live(self) -> list[Caller]:
        """Streams that await their terminal answer, in order of arrival."""
        self._pending = [caller for caller in self._pending if caller.live]
        return list(self._pending)

    def hang_up(self, frontend: str) -> None:
        """Disconnects the streams of a front end that died or restarted, except for those that linger."""
        for (owner, _), caller in self.by_key.items():
            caller.gone |= owner == frontend and not caller.submit.linger_seconds

    def take(self, effect: fx.Admitted | fx.Rejected | fx.StepOutput, now: float) -> None:
        """Records one effect. Raises AssertionError if it breaks a promise of the core."""
        if isinstance(effect, fx.StepOutput):
            self._take_output(effect, now)
            return
        first = self.by_key[effect.frontend, effect.stream]
        for number in first.submit.streams:
            caller = self.by_key[effect.frontend, number]
            assert not caller.admitted and caller.rejected is None, "the request has two first answers"
            if isinstance(effect, fx.Admitted):
                caller.admitted = True
            else:
                caller.rejected = effect

    def _take_output(self, output: fx.StepOutput, now: float) -> None:
        for number in streams_in(output):
            caller = self.by_key[output.frontend, number]
            assert caller.live, f"stream {number}: output after the end"
            caller.take(output, number)
            expected = caller.expected(self._shape).tokens[: len(caller.tokens)]
            assert caller.tokens == list(expected), f"stream {number}: wrong token"
            if caller.tokens and caller.first_at is None:
                caller.first_at = now
        self.num_delivered += len(output.tokens)
        for end in output.ends:
            caller = self.by_key[output.frontend, end.stream]
            assert caller.live, f"stream {end.stream}: ended twice"
            caller.end = end
            self._check_end(caller, end)
            self._check_stats(caller, end.stats, now)

    def _check_end(self, caller: Caller, end: fx.End) -> None:
        assert (end.reason is None) != (end.failure is None)
        caller.check_logprobs(self._shape)
        if end.reason in OWN_ENDS:
            expected = caller.expected(self._shape)
            assert caller.tokens == list(expected.tokens), f"stream {end.stream} ended early"
            assert (end.reason.name, end.stop_token_id) == (expected.reason.name, expected.stop_token_id)
        if end.failure is not None and "while it ran alone" in end.failure.message:
            deaths = caller.lone_deaths[len(caller.tokens)]
            assert deaths >= 2, f"stream {end.stream} was convicted after {deaths} deaths: {end.failure.message}"
        elif end.failure is not None and "the adapter cannot be used" in end.failure.message:
            assert b"toy_refuse" in source_of(caller.submit, ADAPTER) and not caller.tokens, end.failure.message
        elif end.failure is not None and "the constraint" in end.failure.message:
            self._check_constraint(caller, end.failure.message)
        elif end.failure is not None and end.failure.code is fx.FailureCode.INTERNAL:
            assert caller.may_fail, f"stream {end.stream} failed because of another request: {end.failure.message}"

    def _check_constraint(self, caller: Caller, message: str) -> None:
        """A constraint fails at the token that its source names, or when it is prepared."""
        expected, source = caller.expected(self._shape), source_of(caller.submit)
        if "cannot be used" in message:
            assert b"toy_refuse" in source and not caller.tokens, message
        else:
            assert expected.reason is Reason.FAILED and caller.tokens == list(expected.tokens), message
            assert message.endswith((f"at output token {len(caller.tokens) + 1}", "the constraint failed")), message

    def _check_stats(self, caller: Caller, stats: fx.Stats, now: float) -> None:
        heard = len(caller.tokens)
        assert stats.output_tokens == (heard if caller.kept is None else min(caller.kept, heard))
        in_flight = stats.discarded_tokens - (heard - stats.output_tokens)
        assert 0 <= in_flight <= self._plans_in_flight, stats
        assert min(stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds, stats.recomputed_tokens) >= 0, (
            stats
        )
        assert stats.total_seconds == pytest.approx(now - caller.arrived_at)
        first = 0.0 if caller.first_at is None else caller.first_at - caller.arrived_at
        assert stats.first_token_seconds == pytest.approx(first)
        submit = caller.submit
        assert 0 <= stats.cached_prompt_tokens < stats.prompt_tokens == len(submit.prompt)
        may_find = submit.cache_read or submit.num_samples > 1
        assert not stats.cached_prompt_tokens or may_find, "a request with cache_read false had a cache hit"

    def check_answered(self) -> None:
        """Asserts that every connected caller has received a terminal answer."""
        for key, caller in self.by_key.items():
            assert caller.rejected or caller.end or caller.gone, f"{key} received no terminal answer"
            caller.check_logprobs(self._shape)


def poisoned(submit: ev.Submit, *tokens: int) -> bool:
    """True if the prompt holds one of these tokens."""
    return bool(set(submit.prompt.tolist()) & set(tokens))
