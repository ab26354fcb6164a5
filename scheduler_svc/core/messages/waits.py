"""Why requests wait: the reasons, the state of one worker, and what the caller of a request that waits is told."""

from dataclasses import dataclass
from enum import StrEnum


class WaitReason(StrEnum):
    """Why no request can be computed now (the first nine), or why one request waits. Names as in inference.proto."""

    NO_WORKER = "no worker"
    WORKER_LOST = "worker lost"
    WORKER_STARTING = "worker starting"
    ON_STANDBY = "on standby"
    LOADING_WEIGHTS = "loading weights"
    WEIGHTS_REFUSED = "weights refused"
    WORKERS_LEAVING = "workers leaving"
    CRASH_LOOP = "crash loop"
    SHUTTING_DOWN = "shutting down"
    NO_LARGE_WORKER = "no large worker"
    SUSPECT = "suspect"
    CONSTRAINT = "constraint"
    TENANT_SHARE = "tenant share"
    PREEMPTED = "preempted"
    QUEUE = "queue"
    SLOW_STEP = "slow step"
    COMPUTING = "computing"
    """The request has a row again, and no token since it was told to wait."""


SERVICE_REASONS = tuple(WaitReason)[:9]
"""Those that hold for every request that arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotServing:
    """Why a request that arrives now cannot be computed."""

    reason: WaitReason
    message: str
    """One sentence without numbers that change with time."""
    since: float
    """Since when no request can be computed, whatever the reasons were, on the core's clock."""


class WorkerState(StrEnum):
    """What a worker that has joined does."""

    SERVING = "serving"
    STANDBY = "standby"
    STARTING = "starting"
    """Its first step is not confirmed."""
    LOADING = "loading"
    """It loads the service's weights, or does so when its requests have ended."""
    REFUSED = "refused"
    """It cannot load them."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Requests that make no progress for the same reason."""

    reason: WaitReason
    message: str
    """One sentence."""
    streams: tuple[int, ...]
    seconds: tuple[float, ...]
    """For how long each has waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What one front end tells the callers of requests that wait."""

    frontend: str
    waits: tuple[Wait, ...]
