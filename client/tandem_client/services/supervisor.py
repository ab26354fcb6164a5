"""Keeps one child process running: starts it, and starts it again when it ends, until a restart cannot help.

Owns the child's state over all its restarts. `restarts` decides whether and when to restart.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from tandem_client.services.child import Child
from tandem_client.services.restarts import GiveUp, RestartPolicy
from tandem_contract.log_lines import last_line

# How often a pause asks whether it may end early.
_LOOK_SECONDS = 0.2
# The exit status of a child that the system could not start.
_NOT_STARTED = 1
# Has a line with the number of processes that the kernel has killed because memory ran out, also that of a container.
_KERNEL_COUNTS = Path("/proc/vmstat")


class ServiceEnded(Exception):
    """A child ended and is not started again; the message is one line that closes with the child's own last line."""

    def __init__(self, message: str, *, wrong_settings: bool = False, in_order: bool = False) -> None:
        super().__init__(message)
        self.wrong_settings = wrong_settings
        # Whether it was asked to end.
        self.in_order = in_order


class Supervisor:
    """Runs one child again and again. Calls `on_end` at each end, after the child's last line."""

    # `is_urgent`: asked during a pause; the child starts again at once when it returns True.
    def __init__(
        self,
        child: Child,
        policy: RestartPolicy,
        *,
        say: Callable[[str], None],
        on_end: Callable[[], None],
        is_urgent: Callable[[], Awaitable[bool]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.child = child
        # The child's next start sets this event and replaces it with a new one.
        self.next_start = asyncio.Event()
        self._policy = policy
        self._say = say
        self._on_end = on_end
        self._is_urgent = is_urgent
        self._clock = clock
        self._sleep = sleep
        self._ever_served = False
        # When the running child was started, and when it began to serve.
        self._started_at = 0.0
        self._served_at: float | None = None

    def mark_serving(self) -> None:
        """Notes that the running child serves."""
        self._ever_served = True
        if self._served_at is None:
            self._served_at = self._clock()

    async def run(self) -> NoReturn:
        """Starts the child and keeps it running. Raises ServiceEnded if it is not started again."""
        while True:
            status, ended, cause = await self._live()
            now = self._clock()
            served_at = now if self._served_at is None else self._served_at
            decision = self._policy.decide(
                at=now,
                status=status,
                ever_served=self._ever_served,
                start_seconds=served_at - self._started_at,
                served_seconds=now - served_at,
            )
            self._on_end()
            if isinstance(decision, GiveUp):
                message = f"the {self.child.name} {ended}{decision.why}: {cause}"
                raise ServiceEnded(message, wrong_settings=decision.wrong_settings, in_order=decision.in_order)
            self._say(
                f"the {self.child.name} {ended}; it starts again {f'in {decision:.1f} s' if decision else 'at once'}"
            )
            await self._pause(decision)

    async def _pause(self, seconds: float) -> None:
        while seconds > 0 and self._is_urgent is not None:
            if await self._is_urgent():
                return
            await self._sleep(min(seconds, _LOOK_SECONDS))
            seconds -= _LOOK_SECONDS
        await self._sleep(max(0.0, seconds))

    async def _live(self) -> tuple[int, str, str]:
        """Runs the child once; returns its exit status, a text for how it ended, and its own last line as the cause."""
        self._started_at, self._served_at = self._clock(), None
        num_killed = _num_killed_for_memory()
        try:
            await self.child.start()
        except OSError as error:
            return _NOT_STARTED, "could not be started", str(error.strerror)
        self.next_start.set()
        self.next_start = asyncio.Event()
        status = await self.child.wait()
        ended = _how_it_ended(status)
        if status == -signal.SIGKILL and _num_killed_for_memory() > num_killed:
            ended += ", perhaps because memory ran out (the kernel has killed a process for that)"
        return status, ended, last_line(self.child.last_lines)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    names = {int(known): known.name for known in signal.Signals}
    return f"was ended by {names.get(-status, f'signal {-status}')}"


def _num_killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed because memory ran out; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in _KERNEL_COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
