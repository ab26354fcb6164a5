"""The moves of callers that lose their connections and come back, and the checks of what they then get.

Owns the ids of the requests that the core keeps. The core reports the output of detached requests, too, so every token
of a request is known at any time.
"""

import random
from collections import Counter
from collections.abc import Callable

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.simulation.callers import Caller, Callers

# The hash of the secret of every request that lingers.
SECRET_HASH = bytes(range(32))
LingeringEffect = fx.Detached | fx.Forgotten | fx.Resumed | fx.Replaced


class Lingering:
    """`handle` passes an event to the core."""

    def __init__(
        self,
        rng: random.Random,
        callers: Callers,
        handle: Callable[[ev.Event], list[fx.Effect]],
        seen: Counter[str],
    ) -> None:
        self._rng = rng
        self._callers = callers
        self._handle = handle
        self._seen = seen
        self.kept: set[str] = set()
        """The ids that the core keeps."""
        # All that lingered once, the newest last.
        self._ids: list[str] = []
        self._forgotten: list[str] = []
        self.resuming: int | None = None
        """The first stream of the Resume that is being handled."""

    def admitted(self, submit: ev.Submit) -> None:
        """Notes an accepted request."""
        if submit.linger_seconds:
            self.kept.add(submit.request_id)
            self._ids.append(submit.request_id)

    def connection_breaks(self) -> None:
        """A front end reports that the connection of a caller broke."""
        with_reader = [name for name in self._ids[-20:] if name in self.kept and self._first(name).frontend]
        if with_reader:
            submit = self._first(self._rng.choice(with_reader)).submit
            self._handle(ev.Cancel(frontend=submit.frontend, stream=submit.stream, detach=True))

    def resume(self, frontends: list[str]) -> None:
        """A caller comes back: with a wrong secret, although it has a reader, or too late, at times."""
        rng = self._rng
        if not self._ids or not frontends:
            return
        name, is_known = rng.choice(self._ids[-20:]), rng.random() < 0.9
        is_expected = is_known and name in self.kept
        self.resuming = self._callers.next_stream(self._first(name).submit.num_samples)
        secret_hash = SECRET_HASH if is_known else bytes(32)
        frontend, stream = rng.choice(frontends), self.resuming
        effects = self._handle(ev.Resume(frontend=frontend, stream=stream, request_id=name, secret_hash=secret_hash))
        self.resuming = None
        is_resumed = any(isinstance(effect, fx.Resumed) for effect in effects)
        assert is_resumed == is_expected, f"{name} was {'' if is_resumed else 'not '}resumed"
        self._seen["resumed" if is_resumed else "not resumed"] += 1

    def take(self, effect: LingeringEffect) -> None:
        """Applies an effect. Raises AssertionError if it breaks a promise of the core."""
        match effect:
            case fx.Detached():
                self._move(effect.request_id, "", effect.stream)
                self._seen["detached"] += 1
            case fx.Forgotten():
                assert effect.request_id in self.kept
                self.kept.remove(effect.request_id)
                self._forgotten.append(effect.request_id)
            case fx.Replaced():
                self._seen["replaced"] += 1
                assert self._callers.by_key[effect.frontend, effect.stream].submit.stream == effect.stream
            case fx.Resumed():
                for caller, tokens, end in zip(
                    self._callers.of_request(effect.request_id), effect.outputs, effect.ends, strict=True
                ):
                    self._check_resumed(caller, tokens.tolist(), end)
                self._move(effect.request_id, effect.frontend, effect.stream)

    def settle(self) -> None:
        """Called after an event: live samples of forgotten requests have been freed without an answer."""
        for name in self._forgotten:
            for caller in self._callers.of_request(name):
                caller.gone |= caller.live
        self._forgotten.clear()

    def _check_resumed(self, caller: Caller, tokens: list[int], end: fx.End | None) -> None:
        if caller.gone:
            return
        assert (end is None) == (caller.end is None), f"{caller.submit.request_id}: another end"
        heard = caller.tokens
        if end is not None and end.reason is fx.EndReason.STOP_STRING:
            heard = heard[: end.stats.output_tokens]
        assert tokens == heard, f"{caller.submit.request_id}: {tokens} were resumed, {heard} were sent"

    def _move(self, name: str, frontend: str, stream: int) -> None:
        for caller in self._callers.of_request(name):
            self._callers.move(caller, frontend, stream)

    def _first(self, name: str) -> Caller:
        return self._callers.of_request(name)[0]
