"""Terminal answers on their way out, and the tokens that they follow.

Owns the ends of the event being handled. One effect per front end, however many rows a step had.
"""

from collections.abc import Mapping

import numpy as np

from scheduler_svc.core.effects import Effect, End, StepOutput
from scheduler_svc.core.results import Delivery

_NO_STREAMS, _NO_TOKENS = np.zeros(0, np.uint64), np.zeros(0, np.int32)


class Outbox:
    """Empty between events."""

    def __init__(self) -> None:
        self._ends: dict[str, list[End]] = {}

    def add(self, frontend: str, end: End) -> None:
        """Takes in a terminal answer."""
        self._ends.setdefault(frontend, []).append(end)

    def deliver(self, delivery: Delivery, frontends: Mapping[str, int]) -> list[Effect]:
        """A step's tokens, each front end's with its own ends. `frontends` maps to the delivery's indices."""
        effects: list[Effect] = []
        alone = len(frontends) == 1
        for frontend, idx in frontends.items():
            ends = tuple(self._ends.pop(frontend, ()))
            mask = slice(None) if alone else delivery.frontend_idx == idx
            tokens = delivery.tokens[mask]
            if len(tokens) or ends:
                effects.append(
                    StepOutput(
                        frontend=frontend,
                        streams=delivery.streams[mask],
                        offsets=delivery.offsets[mask],
                        tokens=tokens,
                        ends=ends,
                    )
                )
        return effects

    def flush(self, frontends: Mapping[str, int]) -> list[Effect]:
        """What ended without a step. Ends of a front end that is gone have no reader."""
        if not self._ends:
            return []
        ends, self._ends = self._ends, {}
        return [
            StepOutput(frontend=frontend, streams=_NO_STREAMS, offsets=_NO_TOKENS, tokens=_NO_TOKENS, ends=tuple(of))
            for frontend, of in ends.items()
            if frontend in frontends
        ]
