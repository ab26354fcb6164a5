"""Where JSON stands in the output of a row: what the front end says of it, for `names.py`.

The front end writes `json_places` beside a grammar: a list of states, each a list of steps [mark, next state, begun].
Outside of JSON, a row goes to the next state when its output ends with a mark of its state; with `begun`, JSON begins
there, of which the mark has this much. When its first brace is closed, the row is outside again, in the next state. A
mark is a list of texts and ids of control tokens.
"""

import json
from dataclasses import dataclass
from typing import Self

# What a control token begins with in the followed bytes. No text has the first of these, and none is a brace.
MARK = b"\xff<"


def mark(token: int) -> bytes:
    """The followed bytes of a control token."""
    return MARK + b"%d>" % token


@dataclass(frozen=True, slots=True)
class Step:
    """What follows a mark."""

    mark: bytes
    state: int
    begun: bytes


class Places:
    """The places of JSON in the output under one grammar."""

    def __init__(self, states: list[list[Step]]) -> None:
        # The longest mark counts.
        self._states = [sorted(steps, key=lambda step: -len(step.mark)) for steps in states]
        self._marks = [tuple(step.mark for step in steps) for steps in self._states]
        self.longest = max((len(mark) for marks in self._marks for mark in marks), default=1)

    def after(self, state: int, text: bytes) -> Step | None:
        """The step of a state for an output that ends with `text`, if it ends with a mark."""
        if not text.endswith(self._marks[state]):
            return None
        return next(step for step in self._states[state] if text.endswith(step.mark))

    @classmethod
    def of(cls, source: bytes) -> Self | None:
        """What the front end says beside a grammar whose text is JSON; None if no object can have a name twice."""
        if not source.startswith(b'{"grammars"'):
            return None
        states = json.loads(source)["grammars"][0].get("json_places")
        if not states:
            return None
        return cls([[Step(_bytes(parts), next_, begun.encode()) for parts, next_, begun in steps] for steps in states])


def _bytes(parts: list[str | int]) -> bytes:
    return b"".join(mark(part) if isinstance(part, int) else part.encode() for part in parts)
