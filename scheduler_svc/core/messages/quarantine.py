"""The events and effects by which operators see and clear the quarantine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineQuery:
    """An operator asks for the quarantined requests. `query` identifies the QuarantineReply."""

    frontend: str
    query: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearQuarantine:
    """An operator asks to end the quarantine of the requests with these keys, of all requests without keys."""

    frontend: str
    query: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """A request that is refused for a time. Contains neither text nor tokens."""

    key: str
    """Hexadecimal SHA-256 of tenant, prompt and options."""
    request_id: str
    """The id that the request had when it was convicted."""
    tenant: str
    """Hexadecimal hash of the tenant."""
    age_seconds: float
    expires_seconds: float
    """Time until the entry expires."""
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRestored:
    """The quarantine of an earlier process, from its journal: entries that have not expired, oldest first."""

    entries: tuple[QuarantineEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineReply:
    """The entries, oldest first, and for a ClearQuarantine how many were removed."""

    frontend: str
    query: int
    entries: tuple[QuarantineEntry, ...]
    removed: int = 0
