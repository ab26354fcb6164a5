"""Terminal answers on their way out, and the tokens that they follow.

Owns the ends of the event being handled. One effect per front end, however many rows a step had.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_IDS
from scheduler_svc.core.messages.effects import Effect, End, Logprobs, StepOutput, TokenLogprobs
from scheduler_svc.core.update.results import StepTokens

_NO_STREAMS = np.zeros(0, np.uint64)


class OutputCollector:
    """Empty between events."""

    def __init__(self) -> None:
        self._ends: dict[str, list[End]] = {}

    def add(self, frontend: str, end: End) -> None:
        """Takes in a terminal answer."""
        self._ends.setdefault(frontend, []).append(end)

    def deliver(self, delivery: StepTokens, frontends: Mapping[str, int]) -> list[Effect]:
        """A step's tokens, each front end's with its own ends. `frontends` maps to the delivery's indices."""
        effects: list[Effect] = []
        alone = len(frontends) == 1
        for frontend, idx in frontends.items():
            ends = tuple(self._ends.pop(frontend, ()))
            mask = slice(None) if alone else delivery.frontend_idx == idx
            tokens = delivery.tokens[mask]
            logprobs, pieces = delivery.logprobs, delivery.prompt_logprobs
            if not alone:
                logprobs = None if logprobs is None else _of_some(logprobs, delivery.frontend_idx == idx)
                pieces = tuple(piece for piece in pieces if piece.frontend == frontend)
            if len(tokens) or pieces or ends:
                effects.append(
                    StepOutput(
                        frontend=frontend,
                        streams=delivery.streams[mask],
                        offsets=delivery.offsets[mask],
                        tokens=tokens,
                        logprobs=logprobs,
                        prompt_logprobs=pieces,
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
            StepOutput(
                frontend=frontend,
                streams=_NO_STREAMS,
                offsets=NO_IDS,
                tokens=NO_IDS,
                logprobs=None,
                prompt_logprobs=(),
                ends=tuple(of),
            )
            for frontend, of in ends.items()
            if frontend in frontends
        ]


def _of_some(told: TokenLogprobs, chosen: npt.NDArray[np.bool_]) -> TokenLogprobs | None:
    """Those of the chosen entries, numbered as they are among these."""
    mine = chosen[told.entries]
    if not mine.any():
        return None
    values = Logprobs(
        logprobs=told.values.logprobs[mine],
        top_token_ids=told.values.top_token_ids[mine],
        top_logprobs=told.values.top_logprobs[mine],
    )
    places = np.cumsum(chosen) - 1
    return TokenLogprobs(entries=places[told.entries[mine]].astype(np.int32), values=values)
