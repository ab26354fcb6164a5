"""The part of a runner that the link uses. Owns nothing."""

from typing import Protocol

from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.wire.frames import Outcome
from gpu_worker.wire.new_weights import WeightsLoader


class PlanRunner(Protocol):
    """Carries out plans: several may be in flight, and results come in the order of the plans."""

    @property
    def num_in_flight(self) -> int:
        """Plans without a collected result."""
        ...

    @property
    def pool_id(self) -> bytes:
        """Names the memory of the KV pool; empty if it ends with the worker."""
        ...

    @property
    def weights(self) -> WeightsLoader | None:
        """Loads new weights; None if this worker cannot."""
        ...

    @property
    def constraints(self) -> Constraints | None:
        """The constraints that rows may have; None if they may have none."""
        ...

    def report_pages(self, join: pb.Join) -> None:
        """Adds the pages that were kept to a Join."""
        ...

    def join(self, message: pb.Joined) -> None:
        """A session begins."""
        ...

    def submit(self, message: pb.StepPlan) -> None:
        """Begins a plan."""
        ...

    def collect(self, *, wait: bool = True) -> Outcome | None:
        """Returns the oldest result, None if none is there and `wait` is False."""
        ...
