"""Translates the core's event of a token file to the message of the event log, and back. Owns no state."""

from tandem.internal.v1 import record_pb2 as pb

from scheduler_svc.core.messages.events import TenantsChanged
from scheduler_svc.core.messages.tenants import TenantLimits

_NAMES = tuple(TenantLimits.__slots__)


def entry_of(event: TenantsChanged) -> pb.TenantsChanged:
    """Returns the message of the event log."""
    entry = pb.TenantsChanged()
    for name, limits in event.limits.items():
        # A limit of None stays unset.
        entry.tenants.add(name=name, **{field: getattr(limits, field) for field in _NAMES})
    return entry


def event_of(entry: pb.TenantsChanged) -> TenantsChanged:
    """Returns the core's event."""
    return TenantsChanged(
        limits={
            tenant.name: TenantLimits(
                **{field: getattr(tenant, field) for field in _NAMES if tenant.HasField(field)},
            )
            for tenant in entry.tenants
        }
    )
