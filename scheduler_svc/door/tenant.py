"""What the token file says of a tenant, as plain data. Knows neither files nor calls.

A tenant is who pays. A token or a client's certificate belongs to one tenant and gives rights.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler_svc.core.messages.operators import TenantLimits

HASH_BYTES = 32
# Without a token file every request may have a priority of this range.
MAX_PRIORITY = 1000


class Right(StrEnum):
    """What a caller may call."""

    INFERENCE = "inference"
    CONTROL = "control"
    METRICS = "metrics"


Rights = frozenset[Right]
ALL_RIGHTS: Rights = frozenset(Right)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The limits of a tenant's requests that a front end checks."""

    min_priority: int = 0
    max_priority: int = 0
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call."""

    tenant: str
    """The name in the token file; empty without one."""
    rights: Rights
    limits: CallerLimits
    proof: bytes | str | None = None
    """The SHA-256 of the token, or the name in the certificate; None without a token file."""


EVERYONE = Caller(
    tenant="", rights=ALL_RIGHTS, limits=CallerLimits(min_priority=-MAX_PRIORITY, max_priority=MAX_PRIORITY)
)
"""Every caller of a service without a token file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A bearer token."""

    hash: bytes
    """SHA-256 of the token: 32 bytes."""
    rights: Rights
    expires: float
    """Unix time in seconds; infinite without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A client's certificate."""

    name: str
    """A subject alternative name (DNS or URI), or the common name."""
    rights: Rights


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant."""

    name: str
    tokens: tuple[Token, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    caller_limits: CallerLimits = field(default_factory=CallerLimits)
    limits: TenantLimits = field(default_factory=TenantLimits)
    """The limits that the core enforces."""
