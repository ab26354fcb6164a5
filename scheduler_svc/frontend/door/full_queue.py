"""Owns which tenants have no place left in the core's queue, so that their next requests are refused without work.

The core says so when it refuses a request that any other request of the tenant would share the fate of. A front end
cannot see when a place becomes free, so it believes the core for a tenth of a second, or until a request of the tenant
ends here.
"""

import asyncio

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc import status

BELIEVED_SECONDS = 0.1
# More tenants than that are not remembered; their requests are refused by the core.
MAX_TENANTS = 4096


class FullQueue:
    """The tenants that the core refuses now."""

    def __init__(self) -> None:
        # The refusal, and until when it holds, on the loop's clock.
        self._refusals: dict[str, tuple[status.Refusal, float]] = {}

    def rejected(self, tenant: str, message: frontend_pb2.Rejected) -> None:
        """The core has refused a request of the tenant."""
        is_full = message.tenant_is_full and message.code == frontend_pb2.REJECT_CODE_QUEUE_FULL
        if is_full and (tenant in self._refusals or len(self._refusals) < MAX_TENANTS):
            refusal = status.from_rejected(message, "")
            self._refusals[tenant] = refusal, asyncio.get_running_loop().time() + BELIEVED_SECONDS

    def freed(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        self._refusals.pop(tenant, None)

    def check(self, tenant: str) -> None:
        """Raises Refusal (RESOURCE_EXHAUSTED) if the tenant's next request would be refused by the core."""
        if (found := self._refusals.get(tenant)) is None:
            return
        refusal, until = found
        if asyncio.get_running_loop().time() < until:
            # The same exception is raised many times, so the traceback of the last time is removed.
            raise refusal.with_traceback(None)
        del self._refusals[tenant]
