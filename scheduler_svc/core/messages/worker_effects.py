"""The outputs of the core for workers. `effects` has all outputs, these included."""

from dataclasses import dataclass

from scheduler_svc.core.messages.operators import Weights
from scheduler_svc.core.messages.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccepted:
    """The worker has joined and has a lane. The lane's plans carry `generation`."""

    worker: str
    generation: int
    page_root: str = ""
    """`CoreConfig.page_root`."""
    keeps_pages: bool = False
    """Whether the pages that the worker has kept stay as they are. Otherwise it zeroes its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProven:
    """Requests may run on the worker and callers see its limits: a step succeeded, or it was on standby until now."""

    worker: str
    was_standby: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """The worker may not serve. If `retry` is True, it may join again later."""

    worker: str
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRejoin:
    """The core has no lane for this worker, so the worker should join again."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissWorker:
    """The worker was drained: it has no request, and ends."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """The worker hangs. It is killed if the program that started this service started the worker, too."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """The next plan for a worker."""

    worker: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConstraint:
    """The worker is to prepare a constraint, and to answer with ConstraintReady."""

    worker: str
    hash: bytes
    source: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConstraint:
    """No plan in flight uses the constraint, and none will before the next PrepareConstraint."""

    worker: str
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """The worker, which has no plan in flight, is to load these weights."""

    worker: str
    weights: Weights
    roots: tuple[str, ...]
    """`CoreConfig.weights_folders`."""
    keep_rows: bool = False
    """Rows and pages stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChanged:
    """A worker has loaded new weights, which are now those of the service. Only the journal reads this."""

    weights: Weights
