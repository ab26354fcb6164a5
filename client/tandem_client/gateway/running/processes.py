"""Several processes of the gateway at one address, and their parent, which starts a dead one again.

Owns the address and the table of their counters. The kernel spreads connections over the processes.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tandem_client.gateway.metrics import table_bytes
from tandem_client.gateway.running.server import LISTENING, check, url_of
from tandem_client.gateway.settings import Settings
from tandem_contract.child import Program, python
from tandem_contract.logs import announce
from tandem_contract.processes import Heard, Policy, ServiceEnded, State, Supervisor, run_async

log = logging.getLogger("tandem.gateway")

_MODULE = "tandem_client.gateway"
# More than the processes need after their own grace.
_SPARE_SECONDS = 5.0
_POLICY = Policy(max_ends=5)


def run(settings: Settings, bound: socket.socket, arguments: Sequence[str]) -> int:
    """Runs the processes until SIGTERM or SIGINT; returns the status. `bound` keeps the address, also for a port 0.

    Raises SettingError.
    """
    asyncio.run(check(settings))
    host, port = bound.getsockname()[:2]
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with tempfile.TemporaryDirectory(prefix="tandem-gateway-") as folder:
        table = Path(folder) / "counters"
        table.write_bytes(bytes(table_bytes(settings.processes)))
        flags = [*arguments, f"--listen={listen}", "--processes=1", f"--table={table}", "--exit-with-parent"]
        return asyncio.run(_Processes(settings, flags, url_of(settings, bound)).run())


class _Processes:
    def __init__(self, settings: Settings, flags: Sequence[str], url: str) -> None:
        self._settings, self._url = settings, url
        self._num_listening = 0
        self._all = [self._kept(row, flags) for row in range(settings.processes)]

    def _kept(self, row: int, flags: Sequence[str]) -> Supervisor:
        program = Program(argv=python(_MODULE, *flags, f"--row={row}"))
        name = f"gateway {row + 1}"
        return Supervisor(name, lambda: program, _POLICY, hear=self._hear, on_change=self._on_change)

    async def run(self) -> int:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        running = [asyncio.create_task(run_async(each)) for each in self._all]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in self._all:
                each.stop(self._settings.grace_seconds + _SPARE_SECONDS)
            ended = await asyncio.gather(*running, return_exceptions=True)
        failure = next((each for each in ended if isinstance(each, ServiceEnded)), None)
        for fault in ended:
            if isinstance(fault, BaseException) and not isinstance(fault, ServiceEnded | asyncio.CancelledError):
                raise fault
        if failure is None:
            log.info("stopped")
            return 0
        log.error("%s", failure)
        return 2 if failure.wrong_settings else 1

    def _hear(self, line: str) -> Heard:
        if LISTENING in line:
            return Heard.SERVES
        # Without a reader of the log the gateway goes on.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        return Heard.WORDS

    def _on_change(self, one: Supervisor) -> None:
        if one.state == State.PAUSED:
            log.warning("%s", one.ended)
        elif one.state == State.SERVING:
            self._num_listening += 1
            # At the start when all listen, then after each restart.
            if self._num_listening >= self._settings.processes:
                announce("%s %s", LISTENING, self._url)
