"""Several processes of the gateway at one address, and their parent, which starts a dead one again.

Owns the address and the table of their counters. The kernel spreads connections over the processes.
"""

import asyncio
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tandem_client.gateway.metrics import table_bytes
from tandem_client.gateway.running.server import LISTENING, check, url_of
from tandem_client.gateway.settings import Settings
from tandem_client.services.child import Child
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.supervisor import ServiceEnded, Supervisor

log = logging.getLogger("tandem.gateway")

_MODULE = "tandem_client.gateway"
# More than the processes need after their own grace.
_SPARE_SECONDS = 5.0


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
        self._supervisors: dict[str, Supervisor] = {}
        self._num_listening = 0
        for row in range(settings.processes):
            name = f"gateway {row + 1}"
            child = Child(name, _MODULE, [*flags, f"--row={row}"], on_line=self._on_line)
            policy = RestartPolicy()
            self._supervisors[name] = Supervisor(child, policy, say=self._say, on_end=lambda: None)

    async def run(self) -> int:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        running: list[asyncio.Task[NoReturn]] = [asyncio.create_task(each.run()) for each in self._supervisors.values()]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
            await self._stop()
        failure = next((each for each in ended if isinstance(each, ServiceEnded)), None)
        if failure is None:
            log.info("stopped")
            return 0
        log.error("%s", failure)
        return 2 if failure.wrong_settings else 1

    async def _stop(self) -> None:
        seconds = self._settings.grace_seconds + _SPARE_SECONDS
        children = [each.child for each in self._supervisors.values() if each.child.running]
        await asyncio.gather(*(child.stop(seconds) for child in children))

    def _on_line(self, name: str, line: str) -> None:
        if LISTENING not in line:
            print(line, file=sys.stderr, flush=True)
            return
        self._supervisors[name].mark_serving()
        self._num_listening += 1
        # At the start when all listen, then after each restart.
        if self._num_listening >= len(self._supervisors):
            log.info("%s %s", LISTENING, self._url)

    def _say(self, line: str) -> None:
        log.warning("%s", line)
