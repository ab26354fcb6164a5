"""One child process that is kept running: started, started again when it ends, given up when that cannot help.

Owns the child's state over all its restarts. When and whether to restart is `restarts`' decision.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem_client.services.child import Child
from tandem_client.services.log_lines import parse
from tandem_client.services.restarts import End, GiveUp, RestartPolicy

# Stands for the exit status of a child that the system could not start.
_NOT_STARTED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a child was given up. `message` is one line that closes with the child's own last line."""

    name: str
    message: str
    wrong_settings: bool


class Supervisor:
    """Runs a child until it is given up or stopped. `on_end` is called at each end, after the child's last line."""

    def __init__(
        self,
        child: Child,
        policy: RestartPolicy,
        *,
        say: Callable[[str], None],
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.child = child
        # Set at the child's next start, and replaced by a new event then.
        self.next_start = asyncio.Event()
        self._policy = policy
        self._say = say
        self._on_end = on_end
        self._clock = clock
        self._sleep = sleep
        self._ever_served = False
        # When the running child began to serve.
        self._served_at: float | None = None

    def mark_serving(self) -> None:
        """Notes that the running child serves."""
        self._ever_served = True
        if self._served_at is None:
            self._served_at = self._clock()

    async def run(self) -> Failure:
        """Starts the child and keeps it running; returns when it is given up."""
        while True:
            status, ended, cause = await self._live()
            decision = self._policy.decide(self._end(status))
            self._on_end()
            if isinstance(decision, GiveUp):
                message = f"the {self.child.name} {ended}{decision.why}: {cause}"
                return Failure(name=self.child.name, message=message, wrong_settings=decision.wrong_settings)
            when = f"in {decision.pause_seconds:.1f} s" if decision.pause_seconds else "at once"
            self._say(f"the {self.child.name} {ended}; it starts again {when}")
            await self._sleep(decision.pause_seconds)

    async def _live(self) -> tuple[int, str, str]:
        """One life of the child: its exit status, how it ended in words, and the cause as far as it said one."""
        self._served_at = None
        try:
            await self.child.start()
        except OSError as error:
            return _NOT_STARTED, "could not be started", str(error.strerror)
        self.next_start.set()
        self.next_start = asyncio.Event()
        status = await self.child.wait()
        return status, _how_it_ended(status), _last_line(self.child)

    def _end(self, status: int) -> End:
        now = self._clock()
        return End(
            at=now,
            status=status,
            ever_served=self._ever_served,
            served_seconds=0.0 if self._served_at is None else now - self._served_at,
        )


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    names = {int(known): known.name for known in signal.Signals}
    return f"was ended by {names.get(-status, f'signal {-status}')}"


def _last_line(child: Child) -> str:
    lines = [line for line in child.last_lines if line.strip()]
    return parse(lines[-1]).message.strip() if lines else "it printed nothing"
