"""Fake programs with the names of the two services of a checkout; a test writes their code.

The code may use `say(line)`, `stay()`, `life` (the number of earlier starts) and its own imports.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from tandem_client.services import serving
from tandem_client.services.display import Display
from tandem_client.services.lines import line_writer
from tandem_client.services.pair import ServicePair
from tandem_client.services.settings import SCHEDULER, Settings
from tandem_contract.processes import OnZero, Policy
from tests.client.fake_service import WAIT_SECONDS, FakeService
from tests.rigs.processes import child_environment

ROOT = Path(__file__).resolve().parents[2]
STAYS = "stay()"
# What `tandem serve` says when both programs serve.
READY = "ready: tandem generate"
Programs = Callable[..., None]
# What a scheduler without a door reads.
SETTINGS: dict[str, Settings] = {SCHEDULER: {"tokens": None, "tls_cert": None, "tls_key": None, "health_listen": ""}}
_PROGRAM = """
import ctypes, os, pathlib, signal, sys
if "--exit-with-parent" in sys.argv:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
# A signal that comes before `stay` stays pending until then.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
lives = pathlib.Path(__file__).with_suffix(".lives")
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (life + 1))
def say(line):
    print(line, flush=True)
def stay():
    say(f"up {os.getpid()}" + " on standby" * ("--standby" in sys.argv))
    signal.sigwait([signal.SIGTERM, signal.SIGUSR1])
    os._exit(0)
say("flags " + " ".join(sys.argv[1:]))
say(f"pid {os.getpid()}")
"""


def write_programs(folder: Path, *, scheduler: str, worker: str) -> None:
    """Writes both programs into the folder, with the settings of the real ones."""
    for name, life in (("scheduler_svc", scheduler), ("gpu_worker", worker)):
        package = folder / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(_PROGRAM + life)
        settings = package / "settings.py"
        settings.unlink(missing_ok=True)
        settings.symlink_to(ROOT / name / "settings.py")


def environment(folder: Path) -> dict[str, str]:
    """The environment in which the fakes hide the real programs and the client can be imported."""
    path = [folder, ROOT, ROOT / "client", ROOT / "protos", ROOT / ".stubs"]
    return {**child_environment(), "PYTHONPATH": os.pathsep.join(map(str, path))}


class Output(Display):
    """The lines of both programs and of their supervisor, in the order in which they come."""

    def __init__(self, service: FakeService) -> None:
        super().__init__(line_writer(None))
        self.lines: list[str] = []
        # The exit code and the cause, at the end.
        self.end = (-1, "")
        self._service = service
        self._pids: dict[str, int] = {}
        self._more = asyncio.Event()

    def show(self, name: str, line: str) -> None:
        self.lines.append(f"{name} | {line}")
        if name.startswith("worker") and line.startswith("up "):
            # It joins in place of the one that had its name.
            self._pids[name] = int(line.split()[1])
            self._service.worker_pids = list(self._pids.values())
            if line.endswith(" on standby"):
                self._service.standby_pids.append(self._pids[name])
        self._more.set()

    def say(self, line: str) -> None:
        self.show("own", line)

    async def until(self, text: str, *, times: int = 1) -> str:
        """Waits for the text; returns the line with its occurrence number `times`."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(found := [line for line in self.lines if text in line]) < times:
                self._more.clear()
                await self._more.wait()
        return found[times - 1]


def listens(service: FakeService, then: str = STAYS) -> str:
    """The code of a scheduler that says that it listens at the fake service's address."""
    line = f"2026-11-22 02:12:58.026 core INFO frontend listening on {service.address}"
    return f"say({line!r})\n{then}"


def pid_in(line: str) -> int:
    return int(line.rpartition(" ")[2])


@asynccontextmanager
async def serving_fakes(service: FakeService, *, standbys: int = 0, interrupts: bool = True) -> AsyncIterator[Output]:
    """Serves the fakes in this process until the body ends; without `interrupts`, until a fake ends for good."""
    output = Output(service)
    # Pauses that are too short to notice.
    quick = partial(Policy, first_pause_seconds=0.01, last_pause_seconds=0.01)
    pair = ServicePair(
        scheduler_flags=["--of-scheduler"], worker_flags=["--of-worker"], standbys=standbys,
        scheduler_policy=quick(max_ends=5, on_zero=OnZero.WANTED), worker_policy=quick(on_zero=OnZero.AGAIN),
        settings=SETTINGS[SCHEDULER], on_line=output.show, on_end=output.ended, say=output.say,
    )  # fmt: skip
    running = asyncio.create_task(serving.serve(pair, output, SETTINGS))
    yield output
    if interrupts:
        os.kill(os.getpid(), signal.SIGINT)
    output.end = await asyncio.wait_for(running, WAIT_SECONDS)
