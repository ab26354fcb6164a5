"""What the core must know of each tenant of the token file, and the event that brings it."""

from collections.abc import Mapping
from dataclasses import dataclass


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
