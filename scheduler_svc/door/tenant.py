"""What the token file says of a tenant, and the owners of tokens and certificates. Knows no files, no calls.

A tenant is an account. A token or a client's certificate belongs to one tenant and gives rights. A token is looked up
by its SHA-256, so the time of the look-up says nothing about the stored tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from tandem.v1.inference_pb2 import GenerateRequest

from scheduler_svc.core.messages.operators import TenantLimits
from tandem_contract.limits import limit_at

_SCHEME = b"bearer "
# `tandem_` and 32 bytes in base64 are 50 characters.
_MAX_HEADER_BYTES = 512
# Without a token file every request may have a priority of this range.
_PRIORITY = limit_at(GenerateRequest, "priority")
MIN_PRIORITY, MAX_PRIORITY = int(_PRIORITY.least), int(_PRIORITY.most)


class Right(StrEnum):
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
    tenant: str
    """The name in the token file; empty without one."""
    rights: Rights
    limits: CallerLimits
    proof: bytes | str | None = None
    """The SHA-256 of the token, or the name in the certificate; None without a token file."""


EVERYONE = Caller(
    tenant="", rights=ALL_RIGHTS, limits=CallerLimits(min_priority=MIN_PRIORITY, max_priority=MAX_PRIORITY)
)
"""Every caller of a service without a token file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    hash: bytes
    """SHA-256 of the token: 32 bytes."""
    rights: Rights
    expires: float
    """Unix time in seconds; infinite without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    name: str
    """A subject alternative name (DNS or URI), or the common name."""
    rights: Rights


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    tokens: tuple[Token, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    caller_limits: CallerLimits = field(default_factory=CallerLimits)
    limits: TenantLimits = field(default_factory=TenantLimits)
    """The limits that the core enforces."""


class Table:
    """Every token and certificate of the token file."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        # By the token's hash or the certificate's name: its owner, and until when, in Unix time.
        self._owners: dict[bytes | str, tuple[Caller, float]] = {}
        for tenant in tenants:
            # One object for all proofs of a tenant that have the same rights, because there may be 100,000 of them.
            owners = {
                rights: Caller(tenant=tenant.name, rights=rights, limits=tenant.caller_limits)
                for rights in {one.rights for one in (*tenant.tokens, *tenant.certificates)}
            }
            self._owners |= {token.hash: (owners[token.rights], token.expires) for token in tenant.tokens}
            self._owners |= {one.name: (owners[one.rights], math.inf) for one in tenant.certificates}

    def of_call(self, headers: Sequence[bytes], names: Iterable[str], unix_now: float) -> Caller | None:
        """Returns the owner of the call's bearer token (`Authorization`), or, without any, of its certificate.

        `names` are those of the client's verified certificate. One of several headers could be meant for a proxy, so
        none is believed.
        """
        if not headers:
            return self.of_certificate(names)
        header = headers[0]
        if len(headers) > 1 or len(header) > _MAX_HEADER_BYTES or header[: len(_SCHEME)].lower() != _SCHEME:
            return None
        return self.of_token(header[len(_SCHEME) :].strip(), unix_now)

    def of_token(self, token: bytes, unix_now: float) -> Caller | None:
        """Returns the owner of this token, None without one or if it has expired."""
        digest = sha256(token).digest()
        owner, expires = self._owners.get(digest, _NOBODY)
        return None if owner is None or unix_now >= expires else _with_proof(owner, digest)

    def of_certificate(self, names: Iterable[str]) -> Caller | None:
        """Returns the owner of a verified certificate with one of these names; the first known name counts."""
        return next((_with_proof(owner, name) for name in names if (owner := self.of_proof(name)) is not None), None)

    def of_proof(self, proof: bytes | str | None) -> Caller | None:
        """Returns the owner of this proof now, without the proof, also if it has expired; None if it was revoked."""
        return None if proof is None else self._owners.get(proof, _NOBODY)[0]


_NOBODY = None, 0.0


def _with_proof(owner: Caller, proof: bytes | str) -> Caller:
    return Caller(tenant=owner.tenant, rights=owner.rights, limits=owner.limits, proof=proof)
