"""Owns how fast a tenant is refused for want of room: beyond a rate, its refusals are held for up to five seconds.

gRPC accepts the calls of all tenants one after the other, each in a turn of the event loop. A tenant whose many callers
send again at once, whatever the retry hint says, would fill that line, and others would wait in it. While a refusal is
held, its caller does not send. Held calls are bounded, and tenants share the bound (`places`).
"""

import asyncio
import random

import grpc

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.places import Places

# Most retry hints are longer.
MAX_HOLD_SECONDS, LEAST_SHARE = 5.0, 0.5
# Refusals of one tenant that are answered at once: per second, and after a pause.
PER_SECOND = 10
BURST = 20
# Each takes about 60 KB; the next one is answered at once.
MAX_HELD = 1024


class HeldRefusals:
    """The refusals that wait."""

    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared`: whether several tenants call; otherwise nothing is held, because nobody else waits."""
        self._is_shared = is_shared
        self._held = Places(MAX_HELD, is_shared=is_shared)
        # By tenant, the loop's time at which its burst is whole again (virtual scheduling of a leaky bucket, ITU-T
        # I.371, also known as GCRA).
        self._whole_at: dict[str, float] = {}

    async def hold(self, tenant: str | None, refusal: status.Refusal) -> None:
        """Returns when the call may be refused: at once, or after a random part of the time of its retry hint,
        LEAST_SHARE at least, and of at most MAX_HOLD_SECONDS.

        `tenant`: None if it is unknown.
        """
        if not self._is_shared or tenant is None or refusal.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return
        if self._is_within_rate(tenant) or self._held.of(tenant) >= self._held.limit(tenant):
            return
        self._held.add(tenant, 1)
        try:
            # Calls that came together do not return together.
            share = random.uniform(LEAST_SHARE, 1.0)
            await asyncio.sleep(share * min(MAX_HOLD_SECONDS, refusal.retry_after_seconds or 0.0))
        finally:
            self._held.add(tenant, -1)

    def _is_within_rate(self, tenant: str) -> bool:
        now = asyncio.get_running_loop().time()
        whole_at = max(now, self._whole_at.get(tenant, now)) + 1 / PER_SECOND
        if whole_at - now > BURST / PER_SECOND:
            return False
        self._whole_at[tenant] = whole_at
        return True
