"""What a lane may do while its worker loads new weights, and the spans of a request's output by version.

`weights/updates.py` decides; these are its marks, which planning reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.messages.ends import WeightsSpan
from scheduler_svc.core.messages.operators import Running, Weights


@dataclass(slots=True)
class LaneWeights:
    """The marks of one lane."""

    admits: bool = True
    """Whether requests may start on the lane."""
    is_held: bool = False
    """Whether the lane makes no plans at all."""
    loading: Weights | None = None
    """What the worker was told to load and has not answered."""
    version: str = ""
    """The version that it was told to load last."""
    running: Running = Running.RECOMPUTE
    """What happens to the lane's requests when it has."""
    until: float = 0.0
    """A worker that has not answered by then is given up."""
    retry_at: float = 0.0
    """After a refusal: when the worker is asked again."""
    refusal: str = ""
    """Why the worker could not load."""
    pool_id: bytes = b""
    """The pool that the worker uses, kept here meanwhile: nobody may take it over if the worker dies."""

    def begin(self, weights: Weights, running: Running, until: float) -> None:
        """The worker is told to load."""
        self.loading, self.version, self.running, self.until = weights, weights.version, running, until

    def paused(self, seconds: float) -> None:
        """The scheduler did not run, so the worker gets this time in addition."""
        self.until += seconds


class OutputWeights:
    """Which weights computed a request's output. It costs nothing as long as no weights were updated."""

    __slots__ = ("keeps_pages", "spans")

    def __init__(self) -> None:
        self.spans: list[WeightsSpan] = []
        """Empty: those that the workers were started with."""
        self.keeps_pages = False
        """Whether some of the row's pages were computed by older weights. They are shared with nobody."""

    def restore(self, spans: Iterable[WeightsSpan]) -> None:
        """Takes the spans of an output that an earlier process began."""
        self.spans += spans

    def begin(self, version: str, num_outputs: int) -> None:
        """The output continues with this version after `num_outputs` tokens."""
        spans = self.spans
        if (spans[-1].version if spans else "") == version:
            return
        if not spans and num_outputs:
            spans.append(WeightsSpan(from_token=0, version=""))
        if spans and spans[-1].from_token == num_outputs:
            del spans[-1]
        if not spans or spans[-1].version != version:
            spans.append(WeightsSpan(from_token=num_outputs, version=version))

    def of(self, output_tokens: int) -> tuple[WeightsSpan, ...]:
        """Returns the spans of an output of this length."""
        spans = tuple(span for span in self.spans if span.from_token < output_tokens)
        return () if spans and len(spans) == 1 and not spans[0].version else spans
