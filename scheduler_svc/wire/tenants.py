"""Translates the content of the token file: for front ends, and the core's event for the event log. Owns no state."""

import math
from collections.abc import Iterable
from functools import cache

from tandem.internal.v1 import frontend_pb2
from tandem.internal.v1 import record_pb2 as pb

from scheduler_svc.core.messages.events import TenantsChanged
from scheduler_svc.core.messages.operators import TenantLimits
from scheduler_svc.door.tenant import CallerLimits, Certificate, Right, Rights, Tenant, Token

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
    limits: dict[str, TenantLimits] = {}
    for tenant in entry.tenants:
        given = {field.name: value for field, value in tenant.ListFields() if field.name != "name"}
        limits[tenant.name] = TenantLimits(**given)
    return TenantsChanged(limits=limits)


def message_of(tenants: Iterable[Tenant]) -> frontend_pb2.Tenants:
    """Returns the message for front ends."""
    message = frontend_pb2.Tenants()
    for tenant in tenants:
        limits = tenant.caller_limits
        one = message.tenants.add(
            name=tenant.name,
            min_priority=limits.min_priority,
            max_priority=limits.max_priority,
            max_new_tokens=limits.max_new_tokens,
        )
        for token in tenant.tokens:
            expires = 0.0 if math.isinf(token.expires) else token.expires
            one.tokens.add(hash=token.hash, rights=sorted(token.rights), expires=expires)
        for certificate in tenant.certificates:
            one.certificates.add(name=certificate.name, rights=sorted(certificate.rights))
    return message


@cache
def _rights(*names: str) -> Rights:
    """There are few combinations, and 100,000 tokens. A name that this version does not know opens nothing."""
    return frozenset(right for right in Right if right in names)


def tenants_of(message: frontend_pb2.Tenants) -> tuple[Tenant, ...]:
    """Returns the tenants of the message, without the limits that only the core enforces."""
    return tuple(
        Tenant(
            name=one.name,
            tokens=tuple(
                Token(hash=token.hash, rights=_rights(*token.rights), expires=token.expires or math.inf)
                for token in one.tokens
            ),
            certificates=tuple(Certificate(name=each.name, rights=_rights(*each.rights)) for each in one.certificates),
            caller_limits=CallerLimits(
                min_priority=one.min_priority,
                max_priority=one.max_priority,
                max_new_tokens=one.max_new_tokens if one.HasField("max_new_tokens") else None,
            ),
        )
        for one in message.tenants
    )
