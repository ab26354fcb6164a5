"""What comes from operators and goes to them: the token file, drains, new weights, the quarantine. Part of `events`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from scheduler_svc.core.messages.reports import Exchange, RequestEntry, RequestState
from tandem_contract.bounds import Cut, Length, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of one tenant that the core enforces. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens."""
    queue_share: float | None = None
    """The part of `max_waiting` and `max_waiting_tokens` that the tenant's waiting requests may take."""
    row_share: float | None = None
    """The part of the rows of all lanes that the tenant's running requests may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsChanged:
    """The token file was read: the limits by the tenant's name. They replace those of the last event."""

    limits: Mapping[str, TenantLimits]


MAX_OPERATION_SECONDS = 86_400
"""The longest time that an operator gives a drain, or an update of weights."""
MAX_WORKER_NAME_CHARS = 256
MAX_VERSION_CHARS, MAX_FOLDER_CHARS = 128, 4096
"""The longest version and folder of weights."""
MAX_DETAIL_CHARS = 2000
"""The longest sentence for people that another program wrote."""
Duration = Annotated[float, Range(0, MAX_OPERATION_SECONDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOperation(Exchange):
    """An operator starts something that goes on for a while. `query` identifies the answers."""

    stop_replies: bool = False
    """The operator has left, so there are no further answers. The operation goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(StartOperation):
    """An operator drains a worker, or the service if `worker` is empty."""

    worker: Annotated[str, Cut(MAX_WORKER_NAME_CHARS)]
    """The name of a worker, or its process id."""
    max_seconds: Duration
    """0 means no limit for a worker, and that of the shell for the service."""
    force: bool = False
    """Also the last worker that serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """The service begins to shut down: the core rejects new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    """The shutdown's grace period is over: the core ends all live requests."""


class Running(StrEnum):
    """What happens to the requests on a worker that loads new weights."""

    FINISH = "finish"
    """They end first."""
    RECOMPUTE = "recompute"
    """They keep their tokens; keys and values are computed again."""
    CONTINUE = "continue"
    """They go on with the old keys and values."""
    ABORT = "abort"
    """They end with ABORTED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the served model. Versions are never used twice, so equal versions are equal weights."""

    version: Annotated[str, Length(1, MAX_VERSION_CHARS)]
    folder: Annotated[str, Length(1, MAX_FOLDER_CHARS)]
    """Absolute path on the workers' hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights(StartOperation):
    """An operator lets all workers load new weights."""

    weights: Weights
    running: Running = Running.RECOMPUTE
    in_turn: bool = False
    """One worker after the other."""
    max_seconds: Duration = 600.0
    """Workers that have not begun to load by then keep their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """A worker has loaded the weights of `LoadWeights`, or, if `ok` is False, changed nothing."""

    worker: str
    version: Annotated[str, Cut(MAX_VERSION_CHARS)]
    ok: bool
    detail: Annotated[str, Cut(MAX_DETAIL_CHARS)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRestored:
    """The weights that workers had under an earlier scheduler, from the journal. It comes before a worker joins."""

    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineQuery(Exchange):
    """An operator asks for the quarantined requests. `query` identifies the QuarantineReply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearQuarantine(Exchange):
    """An operator asks to end the quarantine of the requests with these keys, of all requests without keys."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """A request that is refused for a time. Contains neither text nor tokens."""

    key: str
    """Hexadecimal SHA-256 of tenant, salt, prompt and options."""
    request_id: str
    """The id that the request had when it was convicted."""
    tenant: str
    """Hexadecimal hash of tenant and salt."""
    age_seconds: float
    expires_seconds: float
    """Seconds until the entry expires."""
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRestored:
    """The quarantine of an earlier process, from its journal: entries that have not expired, oldest first."""

    entries: tuple[QuarantineEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineReply(Exchange):
    """The entries, oldest first, and for a ClearQuarantine how many were removed."""

    entries: tuple[QuarantineEntry, ...]
    removed: int = 0


MAX_PAGE_SIZE = 100
"""Requests in one page of the list: a page takes the core less than 1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsMark:
    """A place in the list of requests."""

    number: int
    """The handle of the last sample before it."""
    epoch: float
    """Which core gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsQuery(Exchange):
    """A caller asks for a page of the list of requests. `query` identifies the RequestsReply."""

    page_size: Annotated[int, Range(1, MAX_PAGE_SIZE)]
    tenant: str | None = None
    """None: those of all tenants."""
    states: frozenset[RequestState] = frozenset()
    """Empty: all."""
    id_prefix: str = ""
    after: RequestsMark | None = None
    """None for the first page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsReply(Exchange):
    """A page of the list, in the order of acceptance."""

    requests: tuple[RequestEntry, ...]
    next: RequestsMark | None
    """None if no others follow."""
    is_stale: bool = False
    """Whether the query's mark is that of another core."""
