"""Standby workers of `tandem serve`: when they start, with which flags, and what their ends mean."""

import os
import signal

import pytest

from tandem_client.services import serving
from tests.client.fake_programs import READY, STAYS, Output, Programs, listens, pid_in, serving_fakes
from tests.client.fake_service import FakeService

STANDBY = "flags --exit-with-parent --of-worker --standby --standby-pages=100"


def flags_of(output: Output, name: str) -> list[str]:
    return [line for line in output.lines if line.startswith(f"{name} | flags")]


async def test_a_standby_worker_starts_when_the_first_one_serves(service: FakeService, programs: Programs) -> None:
    programs(scheduler=listens(service), worker=STAYS)
    async with serving_fakes(service, standbys=2) as output:
        await output.until(READY)
        assert flags_of(output, "worker 1") == ["worker 1 | flags --exit-with-parent --of-worker --standbys=2"]
        await output.until("on standby", times=2)
        begun = [i for i, line in enumerate(output.lines) if line.startswith(("worker 2", "worker 3"))]
        assert "worker 1 | up" in " ".join(output.lines[: begun[0]])
        for name in ("worker 2", "worker 3"):
            # The serving worker has 99 usable pages and the reserved one.
            assert flags_of(output, name) == [f"{name} | {STANDBY}"]
    assert output.end == (0, "")


async def test_a_dead_worker_starts_again_as_a_standby(service: FakeService, programs: Programs) -> None:
    programs(scheduler=listens(service), worker=STAYS)
    async with serving_fakes(service, standbys=1) as output:
        await output.until("on standby")
        # The core seats the standby worker.
        service.standby_pids = []
        os.kill(pid_in(await output.until("worker 1 | pid")), signal.SIGKILL)
        await output.until(READY, times=2)
        await output.until("on standby", times=2)
        assert flags_of(output, "worker 1")[1:] == [f"worker 1 | {STANDBY}"]
        assert len(flags_of(output, "worker 2")) == 1
    assert output.end == (0, "")


async def test_a_worker_that_somebody_has_frozen_is_killed_and_named(
    service: FakeService, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_STOP_SECONDS", 0.5)
    programs(scheduler=listens(service), worker=STAYS)
    async with serving_fakes(service, standbys=1) as output:
        await output.until("on standby")
        os.kill(pid_in(await output.until("worker 2 | pid")), signal.SIGSTOP)
    assert output.end == (0, "")
    assert output.lines[-1] == "own | the worker 2 did not end within 0.5 s and was killed"


async def test_a_standby_worker_that_never_serves_is_tried_again(service: FakeService, programs: Programs) -> None:
    """The service goes on, although the worker's settings do not fit."""
    programs(scheduler=listens(service), worker=f"if life in (1, 2):\n    sys.exit(life)\n{STAYS}")
    async with serving_fakes(service, standbys=1) as output:
        await output.until("on standby")
        ends = [line for line in output.lines if "the worker 2 ended with exit code" in line]
        assert len(ends) == 2 and all("it starts again in" in line for line in ends)
        assert len(flags_of(output, "worker 2")) == 3
    assert output.end == (0, "")
