"""Finds the caller of a token or of a certificate. Knows neither files nor calls.

A token is looked up by its SHA-256, so the time of the look-up says nothing about the stored tokens.
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256

from scheduler_svc.door.tenant import Caller, Rights, Tenant, Token


class Table:
    """Every token and certificate of the token file."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tokens: dict[bytes, tuple[Token, Caller]] = {}
        self._certificates: dict[str, Caller] = {}
        for tenant in tenants:
            # One object for all tokens of a tenant that have the same rights.
            callers: dict[Rights, Caller] = {}
            for one in (*tenant.tokens, *tenant.certificates):
                caller = callers.get(one.rights)
                if caller is None:
                    caller = Caller(tenant=tenant.name, rights=one.rights, limits=tenant.caller_limits)
                    callers[one.rights] = caller
                if isinstance(one, Token):
                    self._tokens[one.hash] = one, caller
                else:
                    self._certificates[one.name] = caller

    def of_token(self, token: bytes, unix_now: float) -> Caller | None:
        """Returns who has this token, None if nobody has or if it has expired."""
        digest = sha256(token).digest()
        found = self._tokens.get(digest)
        if found is None:
            return None
        entry, caller = found
        is_valid = hmac.compare_digest(entry.hash, digest) and unix_now < entry.expires
        return _with_proof(caller, digest) if is_valid else None

    def of_certificate(self, names: Iterable[str]) -> Caller | None:
        """Returns who has a verified certificate with one of these names; the first known name counts."""
        known = next((name for name in names if name in self._certificates), None)
        return None if known is None else _with_proof(self._certificates[known], known)

    def of_proof(self, proof: bytes | str | None) -> Caller | None:
        """Returns who has this proof now, also if it has expired; None if it was revoked."""
        if isinstance(proof, bytes):
            found = self._tokens.get(proof)
            return None if found is None else found[1]
        return None if proof is None else self._certificates.get(proof)


def _with_proof(caller: Caller, proof: bytes | str) -> Caller:
    return Caller(tenant=caller.tenant, rights=caller.rights, limits=caller.limits, proof=proof)
