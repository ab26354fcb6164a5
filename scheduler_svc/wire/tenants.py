"""Pairs the content of the token file with its messages: for front ends, and for the event log. Owns no state."""

import math
from collections.abc import Iterable
from functools import cache

from tandem.internal.v1 import frontend_pb2, record_pb2

from scheduler_svc.core.messages.events import TenantsChanged
from scheduler_svc.core.messages.operators import TenantLimits
from scheduler_svc.door.tenant import Certificate, Right, Rights, Tenant, Token
from tandem_contract.codec import Codec


@cache
def _rights(*names: str) -> Rights:
    """There are few combinations, and 100,000 tokens. A name that this version does not know opens nothing."""
    return frozenset(right for right in Right if right in names)


def _read(message: frontend_pb2.Token | frontend_pb2.Certificate) -> Rights:
    return _rights(*message.rights)


def _sorted(holder: Token | Certificate) -> list[str]:
    return sorted(holder.rights)


_TOKEN = Codec(
    frontend_pb2.Token,
    Token,
    made={"rights": _read, "expires": lambda token: token.expires or math.inf},
    sent={"rights": _sorted, "expires": lambda token: 0.0 if math.isinf(token.expires) else token.expires},
)
_CERTIFICATE = Codec(frontend_pb2.Certificate, Certificate, made={"rights": _read}, sent={"rights": _sorted})
# Without the limits that only the core enforces.
_TENANT = Codec(frontend_pb2.Tenant, Tenant, given=("limits",), parts=(_TOKEN, _CERTIFICATE))
_LIMITS = Codec(record_pb2.TenantLimits, TenantLimits, other=("name",))


def message_of(tenants: Iterable[Tenant]) -> frontend_pb2.Tenants:
    """Returns the message for front ends."""
    return frontend_pb2.Tenants(tenants=[_TENANT.to_message(tenant) for tenant in tenants])


def tenants_of(message: frontend_pb2.Tenants) -> tuple[Tenant, ...]:
    """Returns the tenants of the message, without the limits that only the core enforces."""
    return tuple(map(_TENANT.decode, message.tenants))


def entry_of(event: TenantsChanged) -> record_pb2.TenantsChanged:
    """Returns the message of the event log."""
    return record_pb2.TenantsChanged(
        tenants=[record_pb2.TenantLimits(name=name, **_LIMITS.encode(limits)) for name, limits in event.limits.items()]
    )


def event_of(entry: record_pb2.TenantsChanged) -> TenantsChanged:
    """Returns the core's event."""
    return TenantsChanged(limits={tenant.name: _LIMITS.decode(tenant) for tenant in entry.tenants})
