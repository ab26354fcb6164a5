"""Measures the death of a scheduler with a journal: `python -m tests.measure.takeover.scheduler_loss [--kills N]`.

Kills the scheduler under streams that resume and starts it again at once, N times. `--worker checking` measures a
worker that computes nothing, `--forget-pages` a scheduler that lets its workers keep no page. Times are in seconds
since the kill; they contain the start of the scheduler and the pauses of the clients.
"""

import asyncio
import json
import signal
import sys
from functools import partial

from tandem_client import AsyncClient
from tests.measure.harness import Measurement, spread
from tests.measure.takeover.rounds import NUM_STREAMS, disturbed, prompts
from tests.rigs.processes import Rig, SchedulerProcess, free_address

_VOCABULARY = 250
_SIZES = "--num-pages 1024 --max-rows 32 --max-length 512 --token-budget 512"
_WORKERS = {
    "bundled": f"gpu_worker --device cpu --exit-with-parent {_SIZES}",
    "checking": f"tests.rigs.checking_worker --exit-with-parent --step-ms 4 --page-size 32 {_SIZES}",
}


class Service:
    """One worker, and one scheduler after another at the same address."""

    def __init__(self, rig: Rig, kind: str, *, forgets_pages: bool) -> None:
        self._rig, self._forgets_pages = rig, forgets_pages
        self.address = free_address()
        program, *flags = _WORKERS[kind].split()
        rig.start("worker", program, "--runtime-dir", str(rig.runtime_dir), *flags)
        self.scheduler = self._start()

    def _start(self) -> SchedulerProcess:
        program = ("tests.measure.takeover.without_kept_pages",) if self._forgets_pages else ("scheduler_svc",)
        journal = ("--journal", str(self._rig.runtime_dir / "journal"))
        return self._rig.launch_scheduler(*journal, listen=self.address, program=program)

    def restart(self) -> None:
        """Kills the scheduler, and starts another one when the port is free."""
        self.scheduler.kill_with_frontends()
        self.scheduler = self._start()


async def death(client: AsyncClient, service: Service) -> dict[str, float]:
    """One death under streams of KNOWN_TOKENS known tokens; returns when all have ended."""
    # The vocabulary of a checking worker is small.
    texts = [[token % _VOCABULARY for token in prompt] for prompt in prompts()]
    stop, restart = partial(service.scheduler.signal, signal.SIGSTOP), partial(asyncio.to_thread, service.restart)
    found = await disturbed(client, texts, restart, stop=stop, resume=True)
    return {name: value for name, value in found.items() if name not in ("begun", "longest_pause_seconds", "texts")}


async def _measured(kills: int, kind: str, *, forgets_pages: bool) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    with Rig() as rig:
        service = Service(rig, kind, forgets_pages=forgets_pages)
        async with AsyncClient(service.address) as client:
            await client.wait_ready(60.0)
            for _ in range(kills):
                found.append(await death(client, service))
                # The next round computes its prompts again.
                await client.flush_cache()
                print(json.dumps(found[-1]), file=sys.stderr)
    return found


def main() -> int:
    measurement = Measurement("takeover.scheduler_loss")
    measurement.flag("--kills", type=int, default=10)
    measurement.flag("--worker", choices=sorted(_WORKERS), default="bundled")
    measurement.flag("--forget-pages", action="store_true", help="the scheduler lets its workers keep no page")
    args = measurement.begin()
    found = asyncio.run(_measured(args.kills, args.worker, forgets_pages=args.forget_pages))
    seconds_and_tokens = {name: spread([one[name] for one in found]) for name in found[0]}
    measurement.line({"worker": args.worker, "deaths": len(found), "streams": NUM_STREAMS, **seconds_and_tokens})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
