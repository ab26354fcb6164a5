"""Owns the requests that this front end has detached, so that they end when their caller's token is revoked.

The core knows no tokens. If this front end dies, its detached requests go on until their linger time is over.
"""

import asyncio
import logging
from collections.abc import Callable

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.door.tenant import Caller
from scheduler_svc.frontend.sizes.limits import MAX_ABORT_IDS, MAX_LINGER_SECONDS

logger = logging.getLogger(__name__)

# The oldest ones are forgotten. Each takes 0.4 KB.
MAX_REMEMBERED = 8192


class Detached:
    """`send` passes a message to the core."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        self._send = send
        # The caller, and the loop's time at which the request has ended, by tenant and id, the oldest first.
        self._known: dict[tuple[str, str], tuple[Caller, float]] = {}

    def add(self, request_id: str, caller: Caller) -> None:
        """Remembers a request that lost its reader."""
        if caller.proof is None:
            return
        self.forget(caller.tenant, request_id)
        now = asyncio.get_running_loop().time()
        self._known[caller.tenant, request_id] = caller, now + MAX_LINGER_SECONDS
        for key in list(self._known)[:2]:
            if len(self._known) > MAX_REMEMBERED or self._known[key][1] <= now:
                del self._known[key]

    def forget(self, tenant: str, request_id: str) -> None:
        """The request has a reader again, whose token counts from now on."""
        self._known.pop((tenant, request_id), None)

    def end_revoked(self, is_revoked: Callable[[Caller], bool]) -> None:
        """Aborts the requests of revoked tokens."""
        found: dict[str, list[str]] = {}
        for tenant, request_id in [key for key, (caller, _) in self._known.items() if is_revoked(caller)]:
            self.forget(tenant, request_id)
            found.setdefault(tenant, []).append(request_id)
        for tenant, ids in found.items():
            logger.warning("%d detached requests were ended: their caller's token was revoked", len(ids))
            for at in range(0, len(ids), MAX_ABORT_IDS):
                abort = frontend_pb2.Abort(request_ids=ids[at : at + MAX_ABORT_IDS], tenant=tenant)
                self._send(frontend_pb2.FrontendToCore(abort=abort))
