"""Owns the identity of a call's caller, and the refusal of a call without the right.

A call proves its caller by a bearer token in its metadata, or by the client's certificate if it has no token. All
failed proofs get the same answer, so that no caller learns whether a token was ever valid.
"""

import asyncio
import time
from contextvars import ContextVar
from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.door.tenant import EVERYONE, Caller, Rights, Table
from scheduler_svc.frontend.rpc import status
from scheduler_svc.wire import tenants as tenants_wire
from tandem_contract.needed import needed_task

HEADER = "authorization"
_CERTIFICATE_NAMES = ("x509_subject_alternative_name", "x509_common_name")

_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Returns the caller of the call that the running task serves. Raises LookupError outside a call."""
    return _caller.get()


def caller_name() -> str:
    """Returns the tenant of the running task's call; "" without a token file and for a caller that was not let in."""
    caller = _caller.get(None)
    return "" if caller is None else caller.tenant


class Entrance:
    """Identifies callers. `table` is None until the core has sent the tokens, and always without a token file."""

    def __init__(self, *, needs_tokens: bool) -> None:
        self._needs_tokens = needs_tokens
        self.table: Table | None = None
        # The newest tokens that are not in the table yet.
        self._next: frontend_pb2.Tenants | None = None
        self._loading: asyncio.Task[object] | None = None

    def take(self, message: frontend_pb2.Tenants) -> None:
        """Makes a new table of the core's tokens, in a thread, because 100,000 of them take half a second."""
        self._next = message
        if self._loading is None or self._loading.done():
            self._loading = needed_task(self._load(), "tokens")

    async def _load(self) -> None:
        while self._next is not None:
            message, self._next = self._next, None
            try:
                self.table = await asyncio.to_thread(_table, message)
            except RuntimeError:
                # No thread can be started. Streams wait meanwhile, but none ends.
                self.table = _table(message)

    def is_revoked(self, who: Caller) -> bool:
        """Whether the proof of a caller was revoked, or has lost a right, since the caller was let in."""
        if not self._needs_tokens or self.table is None:
            return False
        now = self.table.of_proof(who.proof)
        return now is None or now.tenant != who.tenant or not who.rights <= now.rights

    def enter(self, rights: Rights, context: Any) -> str:
        """Makes the caller known to the running task; returns its tenant. Raises Refusal without one of the rights."""
        caller = self._caller(context) if self._needs_tokens else EVERYONE
        if rights.isdisjoint(caller.rights):
            wanted = " or ".join(sorted(rights))
            what = f"this method needs the right {wanted}" if wanted else "this method is closed"
            have = ", ".join(sorted(caller.rights))
            raise status.Refusal(
                grpc.StatusCode.PERMISSION_DENIED, f"{what}; the caller's token or certificate has {have}"
            )
        _caller.set(caller)
        return caller.tenant

    def _caller(self, context: Any) -> Caller:
        if self.table is None:
            raise status.not_ready("the service has not read its tokens yet")
        headers = [value for key, value in context.invocation_metadata() or () if key == HEADER]
        proofs = [header if isinstance(header, bytes) else header.encode("utf-8", "replace") for header in headers]
        # gRPC has verified the certificate, and makes a copy of it for each question.
        certificate: Any = {} if headers else context.auth_context()
        names = (name.decode("utf-8", "replace") for key in _CERTIFICATE_NAMES for name in certificate.get(key, ()))
        caller = self.table.of_call(proofs, names, time.time())
        if caller is None:
            why = "the token is not valid" if headers else "a token or a known certificate is needed"
            raise status.Refusal(grpc.StatusCode.UNAUTHENTICATED, why)
        return caller


def _table(message: frontend_pb2.Tenants) -> Table:
    return Table(tenants_wire.tenants_of(message))
