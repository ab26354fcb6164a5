"""Owns the refusals that are held.

**Held refusals.** Beyond a rate, a caller's refusals are held for up to five seconds, whatever the reason. gRPC accepts
the calls of all tenants one after the other, each in a turn of the event loop. A tenant whose many callers send again
at once, whatever the answer says, would fill that line, and others would wait in it. While a refusal is held, its
caller does not send. Held calls are bounded, and tenants share the bound. Callers that are no tenant, because their
proof is wrong, count by their address, and share the places of one tenant.
"""

import asyncio
import random
from typing import Any

import grpc

from scheduler_svc.frontend.grpc_tuning.sockets import network_of
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Places

# Most retry hints are longer. A refusal without a hint would not become another answer by a retry.
MAX_HOLD_SECONDS, LEAST_SHARE = 5.0, 0.5
# Refusals of one caller that are answered at once: per second, and after a pause.
PER_SECOND = 10
BURST = 20
# Each takes about 60 KB; the next one is answered at once.
MAX_HELD = 1024
# Callers whose rate is known, tenants and addresses; more of them count together.
MAX_KNOWN = 4096
# No tenant has such a name.
_UNKNOWN, _OTHERS = "\nunknown", "\nothers"


class HeldRefusals:
    """The refusals that wait."""

    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared`: whether several tenants call; otherwise nothing is held, because nobody else waits."""
        self._is_shared = is_shared
        self._held = Places(Bound(most=MAX_HELD, is_shared=is_shared))
        # By caller, the loop's time at which its burst is whole again (virtual scheduling of a leaky bucket, ITU-T
        # I.371, also known as GCRA). The caller that was refused last is the last one.
        self._whole_at: dict[str, float] = {}

    async def hold(self, tenant: str | None, context: Any, refusal: status.Refusal, begun: float) -> None:
        """Returns when the call may be refused: at once, or after a random part of the time of its retry hint.

        The part is LEAST_SHARE at least. Without a hint, and at most, it is of MAX_HOLD_SECONDS. `tenant`: None if it
        is unknown. `begun`: when the call began, on the loop's clock; its age counts as held.
        """
        # If the service is not ready, it refuses everybody, and nobody waits for an answer behind these callers.
        if not self._is_shared or refusal.ends_answer or refusal.code is grpc.StatusCode.UNAVAILABLE:
            return
        who = address_of(context.peer()) if tenant is None else tenant
        place = _UNKNOWN if tenant is None else tenant
        if self._is_within_rate(who) or not self._held.has_room(place):
            return
        hint = refusal.retry_after_seconds
        most = MAX_HOLD_SECONDS if hint is None else min(MAX_HOLD_SECONDS, hint)
        with self._held.taking(place):
            # Calls that came together do not return together.
            seconds = random.uniform(LEAST_SHARE, 1.0) * most
            await asyncio.sleep(seconds - (asyncio.get_running_loop().time() - begun))

    def _is_within_rate(self, who: str) -> bool:
        now = asyncio.get_running_loop().time()
        while self._whole_at and self._whole_at[oldest := next(iter(self._whole_at))] <= now:
            del self._whole_at[oldest]
        if who not in self._whole_at and len(self._whole_at) >= MAX_KNOWN:
            who = _OTHERS
        whole_at = max(now, self._whole_at.get(who, now)) + 1 / PER_SECOND
        # Sums of tenths are not exact.
        if whole_at - now > BURST / PER_SECOND + 1e-6:
            return False
        self._whole_at.pop(who, None)
        self._whole_at[who] = whole_at
        return True


def address_of(peer: str) -> str:
    """The name under which callers of this peer count. No tenant has a line break in its name."""
    return f"\n{network_of(peer) or ''}"
