"""Owns the second address of a front end: grpc.health.v1 alone, in plaintext, for probes and proxies.

Everyone may call it, so it has few connections, watches and calls of its own, and its callers take none of the others'.
"""

import grpc.aio

from scheduler_svc.frontend import methods
from scheduler_svc.frontend.grpc_tuning.tuning import Tuning
from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.readiness import SERVICES
from scheduler_svc.frontend.rpc.calls import Calls
from scheduler_svc.frontend.rpc.method import CallLimits
from scheduler_svc.frontend.rpc.options import server_options
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES
from scheduler_svc.processes import address

MAX_CONNECTIONS = 128
MAX_WATCHES = 128
_LIMITS = CallLimits(max_without_message_reserved=128, answer_seconds=10.0, max_unread_reserved=128)


class HealthListener:
    """The second server. `health` is its servicer, whose state the owner sets. Make it before the process serves."""

    def __init__(self, listen: str, *, share_port: bool, tuning: Tuning) -> None:
        self.health = HealthServicer(SERVICES, MAX_WATCHES)
        self._listen = listen
        # The port that was bound; 0 before the start.
        self.port = 0
        self._calls = Calls(_LIMITS, is_shared=False, tuning=tuning)
        options = server_options(
            max_message_bytes=MAX_SMALL_BYTES, share_port=share_port, max_connections=MAX_CONNECTIONS
        )
        self._server = grpc.aio.server(options=options)
        methods.add_health(self._server, self._calls, self.health)

    async def start(self) -> None:
        """Listens. Raises address.ListenError."""
        host, port = address.split(self._listen, missing=())
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise address.taken(self._listen, flag="--health-listen") from None
        await self._server.start()

    def sweep(self) -> None:
        """Ends calls that take too long. The owner calls this about once a second."""
        self._calls.sweep(self.health.stalled(_LIMITS.answer_seconds))

    async def stop(self, grace_seconds: float) -> None:
        """Ends all calls after the grace."""
        await self._server.stop(grace_seconds)
