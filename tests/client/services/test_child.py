"""A child process: starts, output and end; log lines; and the thread that writes lines."""

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem_client.services.child import Child, missing_programs
from tandem_client.services.line_writer import LineWriter
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.supervisor import ServiceEnded, Supervisor
from tandem_contract.log_lines import LogLine, as_json, parse
from tests.client.fake_programs import STAYS, quick_policy
from tests.client.fake_service import WAIT_SECONDS
from tests.rigs.waiting import until


def test_children_are_stopped_and_started_again() -> None:
    lines: list[str] = []

    async def live() -> None:
        child = Child("http", "http.server", ["0", "--bind", "127.0.0.1"], on_line=lambda _, line: lines.append(line))
        await child.start()
        first = child.pid
        child.signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        await child.start()
        assert child.pid != first
        assert child.running
        assert await child.stop(grace_seconds=10) == -signal.SIGTERM

    asyncio.run(live())


def test_a_child_that_the_kernel_killed_for_memory_is_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, said = tmp_path / "vmstat", list[str]()
    monkeypatch.setattr("tandem_client.services.supervisor._KERNEL_COUNTS", counts)

    class Fake(Child):
        lives = 0

        async def start(self) -> None:
            self.lives += 1

        async def wait(self) -> int:
            # Nobody, nobody, another process before an orderly end, this one.
            counts.write_text(f"nr_free_pages 5\noom_kill {(3, 3, 4, 5)[self.lives - 1]}\noom_kill_x 9\n")
            supervising.mark_serving()
            return (-signal.SIGKILL, -signal.SIGTERM, 1, -signal.SIGKILL)[self.lives - 1]

    counts.write_text("oom_kill 3\n")
    policy = RestartPolicy(max_ends=4, first_pause_seconds=0.0)
    supervising = Supervisor(
        Fake("worker", "gpu_worker", [], on_line=lambda *_: None), policy, say=said.append, on_end=lambda: None
    )
    with pytest.raises(ServiceEnded, match=r"SIGKILL, perhaps because memory ran out .*, 4 times within 60 s"):
        asyncio.run(supervising.run())
    assert not any("memory" in line for line in said) and len(said) == 3


def test_the_pause_depends_on_how_long_the_child_took_to_serve_and_served() -> None:
    now, said = [100.0], list[str]()

    class Fake(Child):
        lives = 0

        async def start(self) -> None:
            self.lives += 1

        async def wait(self) -> int:
            if self.lives < 4:
                now[0] += 4.0
                supervisor.mark_serving()
                now[0] += (3.9, 4.0, 2.0)[self.lives - 1]
            return 1

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    child = Fake("worker", "gpu_worker", [], on_line=lambda *_: None)
    policy = RestartPolicy(max_ends=4, rng=random.Random(1))
    supervisor = Supervisor(child, policy, say=said.append, on_end=lambda: None, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(ServiceEnded, match="4 times"):
        asyncio.run(supervisor.run())
    again = "the worker ended with exit code 1; it starts again"
    assert [re.sub(r"\d\.\d s", "some time", line) for line in said] == [
        f"{again} in some time",
        f"{again} at once",
        f"{again} in some time",
    ]


def test_the_end_of_a_child_kills_the_processes_that_it_started(programs: Callable[..., None]) -> None:
    """A grandchild that holds the output open would otherwise hide the child's end."""
    lines: list[str] = []
    sleeps = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    programs(scheduler=f"import subprocess\nprint('beside', {sleeps}.pid, flush=True)\nsys.exit(3)", worker=STAYS)

    async def live() -> int:
        child = Child("scheduler", "scheduler_svc", [], on_line=lambda _, line: lines.append(line))
        await child.start()
        return await asyncio.wait_for(child.wait(), WAIT_SECONDS)

    assert asyncio.run(live()) == 3
    assert lines[-2].startswith("pid ")
    grandchild = int(lines[-1].removeprefix("beside "))
    # Another parent inherits the dead process, so it may remain as a zombie.
    until(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE)


def test_a_program_that_cannot_be_started_raises_an_error_with_the_cause() -> None:
    class Refused(Child):
        async def start(self) -> None:
            raise OSError(11, "Resource temporarily unavailable")

    def supervisor() -> Supervisor:
        child = Refused("worker", "gpu_worker", [], on_line=lambda *_: None)
        return Supervisor(child, quick_policy(), say=said.append, on_end=lambda: None)

    said: list[str] = []
    cause = "Resource temporarily unavailable"
    with pytest.raises(ServiceEnded) as end:
        asyncio.run(supervisor().run())
    assert str(end.value) == f"the worker could not be started before it served: {cause}"
    after_service = supervisor()
    after_service.mark_serving()
    with pytest.raises(ServiceEnded) as end:
        asyncio.run(after_service.run())
    assert str(end.value) == f"the worker could not be started, 5 times within 60 s; it is not started again: {cause}"
    assert len(said) == 4


def test_programs_are_found_without_importing_them() -> None:
    before = set(sys.modules)
    assert missing_programs(["this", "no_such_program"]) == ["no_such_program"]
    assert "this" not in set(sys.modules) - before


def test_lines_of_the_log_are_read_in_both_formats() -> None:
    core = LogLine("core", "WARNING", "worker lost: gone")
    assert parse("2026-11-22 02:12:58.026 core WARNING worker lost: gone") == core
    record = '{"time": "2026-11-22T02:12:58.026+00:00", "process": "core", "pid": 1, "level": "WARNING", '
    assert parse(record + '"message": "worker lost: gone"}') == core
    for other in ("gpu_worker: device: no such device", '{"a": 1}', "{", "[1]"):
        assert parse(other) == LogLine("", "", other)


def test_every_line_becomes_one_of_a_json_log() -> None:
    ours = '{"time": "t", "process": "core", "pid": 1, "level": "WARNING", "message": "lost"}'
    assert as_json("scheduler", ours) == ours
    for other in ("gpu_worker: no such device", '{"a": 1}', "{", "[1]", "\x1b[2J\u2028", '{"process": "core"'):
        made = json.loads(as_json("scheduler", other, level="ERROR"))
        assert (made["process"], made["level"], made["message"]) == ("scheduler", "ERROR", other)
        assert set(made) == set(json.loads(ours)) and as_json("scheduler", other).isascii()


def test_a_writer_without_a_reader_drops_and_counts_lines() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading) as reader:
        writer = LineWriter(stream, max_lines=100, own_line="own: {}".format)
        for n in range(20_000):
            writer.write(f"{n:050}")
        # The pipe is full, so this call times out.
        writer.close(0.01)
        written: list[int] = []
        num_dropped = 0
        while len(written) + num_dropped < 20_000:
            line = reader.readline().rstrip()
            dropped = re.fullmatch(r"own: (\d+) lines were dropped because the output was not read in time", line)
            if dropped is None:
                written.append(int(line))
            else:
                num_dropped += int(dropped[1])
    assert num_dropped > 0
    assert written == sorted(set(written))


def test_a_writer_survives_the_end_of_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        writer = LineWriter(stream)
        for _ in range(3):
            writer.write("x")
        writer.close(WAIT_SECONDS)
    assert not writer._thread.is_alive()
