"""The callers of a chaos run: keeps a number of streams open, lets some misbehave, and checks each one that ends.

Owns the open streams and the rules of how a stream may end. A stream that finishes must equal the oracle, and any
other one a prefix of it. A stream may end UNAVAILABLE only if a front end or the scheduler died while it was open; then
it is resumed. Knows nothing of workers.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from tests.chaos.connections import Connection
from tests.chaos.requests import POISONS, random_ask
from tests.rigs import byte_tokenizer
from tests.rigs.streams import Stream
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask

# What a caller does once it has some tokens; most read to the end.
_FATES = {"reads": 82, "cancels": 6, "aborts": 4, "deadline": 3, "pauses": 4, "stalls": 1}
# Callers that come back after their stream broke; the others ask for no linger.
_RESUMING = ("reads", "cancels", "aborts", "pauses")
_POISON_SHARE = 0.02
_PAUSE_SECONDS = (0.5, 3.0)
_RESUME_PAUSE_SECONDS = 0.2
# After a caller has reached no service, all callers together wait this time before the next try.
_RETRY_SECONDS = 0.02
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One request and its open stream. `act_after` is the number of tokens after which its caller acts."""

    ask: Ask
    connection: Connection
    stream: Stream
    fate: str = "reads"
    act_after: int = 0
    # The name of its poison, or empty.
    poison: str = ""
    began: float
    # The time of the last token, and the number of tokens then.
    moved: float
    num_tokens: int = 0
    acted: bool = False
    acts_again: float = 0.0
    secret: bytes = b""
    resumes_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class Outages:
    """When callers may see UNAVAILABLE: from the death of a front end or the scheduler until all are served again."""

    spans: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    open_since: float | None = None

    def begin(self, now: float) -> None:
        self.open_since = now if self.open_since is None else self.open_since

    def end(self, now: float) -> None:
        assert self.open_since is not None
        self.spans.append((self.open_since, now))
        self.open_since = None

    def touches(self, began: float) -> bool:
        """Whether an outage happened since `began`."""
        return self.open_since is not None or any(end >= began for _, end in self.spans)


class Load:
    """Call `turn` often. `counts` gets the outcome of every stream."""

    def __init__(
        self,
        connections: Sequence[Connection],
        rng: random.Random,
        num_streams: int,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self.outages = Outages()
        self.crowded_until = self._opens_at = 0.0
        self._connections = connections
        self._rng = rng
        self._num_streams = num_streams
        self._counts = counts
        self._number = 0
        self.flights: list[Flight] = []
        # Requests that may linger, because they broke before their caller knew the secret.
        self.orphans: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the open streams."""
        return sum(flight.num_tokens for flight in self.flights)

    def turn(self, *, open_new: bool = True) -> None:
        """Opens streams up to the number, lets callers act, and checks streams that have ended."""
        now = self._clock()
        while open_new and len(self.flights) < self._num_streams and now >= self._opens_at:
            self.flights.append(self._open())
        for flight in list(self.flights):
            if flight.resumes_at:
                if now >= flight.resumes_at:
                    flight.resumes_at = 0.0
                    self._resume(flight)
            elif flight.stream.ended:
                if self._ends(flight, now):
                    self.flights.remove(flight)
            else:
                self._watch(flight, now)

    def burst(self, count: int) -> list[Flight]:
        """Opens many short requests at once, of which the service refuses those that do not fit its queue."""
        self.crowded_until = self._clock() + 10.0
        flights: list[Flight] = []
        for _ in range(count):
            self._number += 1
            ask = Ask(prompt=(self._rng.randrange(256), ord("a")), max_new_tokens=2, request_id=f"burst-{self._number}")
            flights.append(self._flight(ask, fate="burst"))
        self.flights += flights
        return flights

    def send_poison(self) -> None:
        """Opens a stream for a request that kills, hangs or fails every step that computes it; its caller reads."""
        self._number += 1
        poison = self._rng.choice([name for name in POISONS if name != "nonfinite-token"])
        ask = random_ask(self._rng, f"poison-{self._number}", poison=POISONS[poison])
        self.flights.append(self._flight(ask, poison=poison))

    def _flight(self, ask: Ask, timeout: float | None = None, **fields: Any) -> Flight:
        """Opens the stream of a request through any front end."""
        connection, now = self._rng.choice(self._connections), self._clock()
        stream = connection.generate(ask.request(), timeout)
        return Flight(ask=ask, connection=connection, stream=stream, began=now, moved=now, **fields)

    def _open(self) -> Flight:
        rng, self._number = self._rng, self._number + 1
        fate = rng.choices(list(_FATES), list(_FATES.values()))[0]
        # Those that only make their own logits bad are many; the others come one by one (`poison`).
        poison = "nonfinite-token" if rng.random() < _POISON_SHARE else ""
        resumes = fate in _RESUMING and rng.random() < 0.9
        ask = random_ask(rng, f"chaos-{self._number}", poison=POISONS.get(poison), resumes=resumes)
        timeout = rng.uniform(0.01, 3.0) if fate == "deadline" else None
        return self._flight(ask, timeout, fate=fate, act_after=rng.randrange(20), poison=poison)

    def _watch(self, flight: Flight, now: float) -> None:
        transcript = flight.stream.transcript
        if not flight.secret and transcript.accepted is not None:
            flight.secret = transcript.accepted.resume_secret
        count = sum(len(sample.tokens) for sample in list(transcript.samples.values()))
        if count > flight.num_tokens or self.outages.open_since is not None:
            flight.num_tokens, flight.moved = count, now
        if flight.acts_again and now >= flight.acts_again:
            flight.acts_again, flight.moved = 0.0, now
            if flight.fate == "pauses":
                flight.stream.resume()
            else:
                flight.stream.cancel()
        elif not flight.acted and count >= flight.act_after:
            self._act(flight, now)
        stuck = now - flight.moved
        assert stuck < TIMEOUT_SECONDS, f"{flight.ask.request_id} ({flight.fate}) is stuck for {stuck:.0f} s"

    def _act(self, flight: Flight, now: float) -> None:
        flight.acted = True
        match flight.fate:
            case "cancels":
                flight.stream.cancel()
                # For the service, a cancelled call looks like a broken one, so callers give up by Abort.
                flight.connection.abort(flight.ask.request_id)
            case "aborts":
                flight.connection.abort(flight.ask.request_id)
            case "pauses" | "stalls":
                flight.stream.stall()
                flight.acts_again = now + self._rng.uniform(*_PAUSE_SECONDS)
            case _:
                pass

    def _ends(self, flight: Flight, now: float) -> bool:
        """Checks an ended stream. Returns False if it is resumed."""
        stream, fate = flight.stream, flight.fate
        if stream.failure is not None:
            raise AssertionError(f"{flight.ask.request_id} ({fate}): {stream.failure}") from stream.failure
        if stream.error is None:
            self._finished(flight)
            return True
        code, details = stream.error.code(), stream.error.details()
        self._check_prefix(flight)
        what = f"{flight.ask.request_id} ({fate}, {flight.num_tokens} tokens) ended {code.name}: {details}"
        if fate in ("cancels", "stalls") and flight.acted and code == grpc.StatusCode.CANCELLED:
            self._counts[f"streams: {fate}"] += 1
        elif fate == "deadline" and code == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._counts["streams: deadline"] += 1
        elif flight.poison and code == grpc.StatusCode.INTERNAL:
            self._counts[f"{flight.poison}: ended INTERNAL"] += 1
            if flight.poison != "nonfinite-token":
                self._resubmit(flight, now)
        elif flight.fate == "resubmitted" and "quarantine" in str(details):
            self._counts["resubmitted poison refused"] += 1
        elif code == grpc.StatusCode.RESOURCE_EXHAUSTED and now < self.crowded_until + 10.0:
            self._counts["requests refused by a full queue"] += 1
        elif code in _UNREACHABLE and self.outages.touches(flight.began):
            return self._broke(flight, now)
        elif code == grpc.StatusCode.NOT_FOUND and flight.fate == "aborts" and flight.acted and flight.secret:
            self._counts["streams: aborted before they were resumed"] += 1
        else:
            raise AssertionError(what)
        return True

    def _resubmit(self, flight: Flight, now: float) -> None:
        """Sends a convicted request once more; it must be refused without another death."""
        if flight.fate == "resubmitted":
            self._counts["resubmitted poison convicted again"] += 1
            return
        stream = flight.connection.generate(flight.ask.request())
        self.flights.append(replace(flight, stream=stream, fate="resubmitted", began=now, moved=now, num_tokens=0))

    def _broke(self, flight: Flight, now: float) -> bool:
        """A front end or the scheduler died. Returns False if the stream is resumed."""
        if flight.stream.transcript.accepted is None and not flight.secret:
            self._counts["requests that broke before Accepted"] += 1
            self.orphans.append(flight.ask.request_id)
            self._opens_at = now + _RETRY_SECONDS
            return True
        if not flight.secret or (flight.acted and flight.fate == "cancels"):
            self._counts["streams ended by a death of front end or scheduler"] += 1
            return True
        self._counts["resumes"] += 1
        flight.resumes_at = now + _RESUME_PAUSE_SECONDS
        return False

    def _resume(self, flight: Flight) -> None:
        """Continues a broken stream, through any front end."""
        ask, connection = flight.ask, self._rng.choice(self._connections)
        flight.stream = connection.resume(ask.request_id, flight.secret, flight.stream.transcript, ask.num_samples)

    def _finished(self, flight: Flight) -> None:
        transcript = flight.stream.transcript
        reasons = {sample.reason for sample in transcript.samples.values()}
        if "ABORTED" in reasons:
            assert flight.fate in ("aborts", "cancels"), f"{flight.ask.request_id} ({flight.fate}) ended ABORTED"
            self._check_prefix(flight)
            self._counts["streams: aborted"] += 1
            return
        assert not flight.poison, f"{flight.ask.request_id} finished although its logits are not finite"
        flight.ask.check(transcript)
        self._counts["streams equal to the oracle"] += 1

    def _check_prefix(self, flight: Flight) -> None:
        """Asserts that what the caller got is the beginning of the oracle's answer."""
        if flight.poison:
            return
        for idx, sample in flight.stream.transcript.samples.items():
            expected = flight.ask.expected(idx)
            assert sample.tokens == expected.tokens[: len(sample.tokens)], f"{flight.ask.request_id}: wrong tokens"
            # The end of a stream also ends a character that lacks its last bytes.
            texts = (expected.text, byte_tokenizer.decode(sample.tokens))
            assert any(text.startswith(sample.text) for text in texts), f"{flight.ask.request_id}: wrong text"
