"""Collects terminal answers, and emits them after the tokens of the same step.

A step makes one effect per front end, independent of its number of rows.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_IDS
from scheduler_svc.core.messages.effects import Effect, End, Logprobs, StepOutput, TokenLogprobs
from scheduler_svc.core.update.results import DETACHED, StepTokens

_NO_STREAMS = np.zeros(0, np.uint64)


class OutputCollector:
    """Holds the terminal answers of the event that is being handled, by front end. It is empty between events.

    With `report_detached`, the output of requests without a reader is emitted too, for the front end "".
    """

    def __init__(self, *, report_detached: bool = False) -> None:
        self._others: dict[str, int] = {"": DETACHED} if report_detached else {}
        self._ends: dict[str, list[End]] = {}

    def add(self, frontend: str, end: End) -> None:
        """Adds a request's terminal answer."""
        self._ends.setdefault(frontend, []).append(end)

    def deliver(self, step_tokens: StepTokens, frontends: Mapping[str, int], weights_version: str = "") -> list[Effect]:
        """Returns the step's tokens and ends for each front end. `frontends` maps names to indices."""
        effects: list[Effect] = []
        # Without a mask, which costs time, if all tokens are for the only front end.
        alone = len(frontends) == 1 and np.count_nonzero(step_tokens.frontend_idx) == len(step_tokens.frontend_idx)
        readers = {**frontends, **self._others} if self._others else frontends
        for frontend, idx in readers.items():
            ends = tuple(self._ends.pop(frontend, ()))
            gets_all = alone and idx != DETACHED
            mask = slice(None) if gets_all else step_tokens.frontend_idx == idx
            tokens = step_tokens.tokens[mask]
            logprobs, pieces = step_tokens.logprobs, step_tokens.prompt_logprobs
            if not gets_all:
                logprobs = None if logprobs is None else _of_some(logprobs, step_tokens.frontend_idx == idx)
                pieces = tuple(piece for piece in pieces if piece.frontend == frontend)
            if len(tokens) or pieces or ends:
                effects.append(
                    StepOutput(
                        frontend=frontend,
                        streams=step_tokens.streams[mask],
                        offsets=step_tokens.offsets[mask],
                        tokens=tokens,
                        logprobs=logprobs,
                        prompt_logprobs=pieces,
                        ends=ends,
                        weights_version=weights_version,
                    )
                )
        return effects

    def flush(self, frontends: Mapping[str, int]) -> list[Effect]:
        """Returns the collected ends that no step delivered. Ends without a connected front end are dropped."""
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
            if frontend in frontends or frontend in self._others
        ]


def _of_some(all_logprobs: TokenLogprobs, chosen: npt.NDArray[np.bool_]) -> TokenLogprobs | None:
    """Returns the logprobs of the chosen entries; `entries` are then indices among the chosen ones."""
    mine = chosen[all_logprobs.entries]
    if not mine.any():
        return None
    values = Logprobs(
        logprobs=all_logprobs.values.logprobs[mine],
        top_token_ids=all_logprobs.values.top_token_ids[mine],
        top_logprobs=all_logprobs.values.top_logprobs[mine],
    )
    places = np.cumsum(chosen) - 1
    return TokenLogprobs(entries=places[all_logprobs.entries[mine]].astype(np.int32), values=values)
