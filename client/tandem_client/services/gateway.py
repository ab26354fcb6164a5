"""The OpenAI-compatible gateway beside a scheduler: its flags, its start, and the scheduler's address.

The gateway starts when the scheduler listens, and starts again if the scheduler comes back at another address.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import NoReturn

from tandem_client.services.child import Child, OnLine
from tandem_client.services.probe import gateway_flags
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.supervisor import Supervisor

PROGRAM = "tandem_client.gateway"
# Its line at each start. Wrong flags end it before.
_LISTENING = "gateway listening on "


class Gateway:
    """The gateway's process over all its restarts."""

    def __init__(
        self, flags: Sequence[str], scheduler_flags: Sequence[str], *, on_line: OnLine, say: Callable[[str], None]
    ) -> None:
        self._flags, self._scheduler_flags = list(flags), list(scheduler_flags)
        self._on_line = on_line
        self._address = ""
        self._known = asyncio.Event()
        self.child = Child("gateway", PROGRAM, flags, on_line=self._on_child_line)
        # The service goes on without it.
        self._supervisor = Supervisor(self.child, RestartPolicy(max_ends=None), say=say, on_end=lambda: None)

    def follow(self, address: str, health: str) -> None:
        """Takes the address of the scheduler that listens now, and that of its health; empty without one."""
        if address == self._address:
            return
        self._address = address
        own = [f"--health-address={health}"] if health else []
        # The user's own flags come last, so that they count.
        self.child.arguments = [*gateway_flags(self._scheduler_flags, address), *own, *self._flags]
        if self._known.is_set():
            self.child.signal(signal.SIGTERM)
        self._known.set()

    async def run(self) -> NoReturn:
        """Starts the gateway when a scheduler listens, and keeps it running. Raises ServiceEnded."""
        await self._known.wait()
        return await self._supervisor.run()

    def _on_child_line(self, name: str, line: str) -> None:
        self._on_line(name, line)
        if _LISTENING in line:
            self._supervisor.mark_serving()
