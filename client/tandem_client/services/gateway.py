"""The OpenAI-compatible gateway beside a scheduler: its flags, its start, and the scheduler's address.

The gateway starts when the scheduler listens, and starts again if the scheduler comes back at another address.
"""

import signal
from collections.abc import Callable, Sequence

from tandem_client.services.probe import gateway_flags
from tandem_client.services.programs import RESTARTED, OnLine, kept
from tandem_contract.child import Program, python
from tandem_contract.processes import Heard

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
        self._address, self._health = "", ""
        self.process = kept("gateway", self._program, RESTARTED, hear=self._hear, say=say)

    def follow(self, address: str, health: str) -> None:
        """Takes the address of the scheduler that listens now, and that of its health; empty without one."""
        if address == self._address:
            return
        is_first = not self._address
        self._address, self._health = address, health
        if is_first:
            self.process.hurry()
        else:
            self.process.signal(signal.SIGTERM)

    def _program(self) -> Program | None:
        if not self._address:
            return None
        own = [f"--health-address={self._health}"] if self._health else []
        # The user's own flags come last, so that they count.
        flags = [*gateway_flags(self._scheduler_flags, self._address), *own, *self._flags]
        return Program(argv=python(PROGRAM, *flags))

    def _hear(self, line: str) -> Heard:
        self._on_line(self.process.name, line)
        return Heard.SERVES if _LISTENING in line else Heard.WORDS
