"""A service with an unread stderr keeps serving and counts the log lines that it dropped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.rigs.processes import REPOSITORY, Rig, child_environment, free_address, popen
from tests.rigs.streams import Caller
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask, answer, send

# More than the log queue of one process holds; each request is one line of the front end.
NUM_REQUESTS, BATCH = 1_200, 40


class UnreadPipe:
    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.fill()

    def fill(self) -> None:
        # A separate description is non-blocking; the service's own writes must block, as those of any program do.
        filling = os.open(f"/proc/self/fd/{self.writing}", os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            try:
                while True:
                    os.write(filling, b"\n" * size)
            except BlockingIOError:
                pass
        os.close(filling)

    def lines(self) -> Iterator[str]:
        """The lines after the filling, one by one."""
        with open(os.dup(self.reading)) as file:
            yield from (line.rstrip("\n") for line in file if line != "\n")

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[UnreadPipe]:
    pipe = UnreadPipe()
    yield pipe
    pipe.close()


def test_requests_are_served_while_stderr_is_blocked(rig: Rig, pipe: UnreadPipe) -> None:
    address = free_address()
    flags = ["--runtime-dir", str(rig.runtime_dir), "--listen", address, "--log-format", "json"]
    with popen("scheduler_svc", *flags, stdout=pipe.writing, stderr=pipe.writing) as scheduler:
        rig.worker("--max-rows", "32", late=False)
        caller = Caller(address)
        rig.callers.append(caller)
        caller.wait_serving()
        ask = Ask(prompt=(1, 2, 3), max_new_tokens=1)
        for _ in range(NUM_REQUESTS // BATCH):
            send(caller, [ask] * BATCH).check()
        assert scheduler.poll() is None
        counted = 0
        for line in pipe.lines():
            record = json.loads(line)
            counted += record["process"] == "frontend"
            if "were dropped" in record["message"]:
                break
        assert record["process"] == "frontend"
        dropped = int(record["message"].split()[0].replace(",", ""))
        # These are the lines of requests, start and model, and the count of dropped lines.
        assert 0 < dropped < NUM_REQUESTS
        assert counted + dropped <= NUM_REQUESTS + 10
        answer(caller, ask)
        pipe.fill()
        scheduler.send_signal(signal.SIGTERM)
        assert scheduler.wait(TIMEOUT_SECONDS) == 0


def test_the_service_runs_with_closed_standard_streams(rig: Rig) -> None:
    address = free_address()
    recorded = rig.runtime_dir / "record"
    command = [sys.executable, "-m", "scheduler_svc", "--runtime-dir", str(rig.runtime_dir), "--listen", address]
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command, "--record", str(recorded)],
        cwd=REPOSITORY, env=child_environment(),
    ) as scheduler:  # fmt: skip
        rig.worker(late=False)
        caller = Caller(address)
        rig.callers.append(caller)
        caller.wait_serving()
        ask = Ask(prompt=(1, 2, 3), max_new_tokens=20)
        answer(caller, ask)
        scheduler.send_signal(signal.SIGTERM)
        assert scheduler.wait(TIMEOUT_SECONDS) == 0
    # No log line was written to a file that reused the descriptor number of stderr.
    rig.check_record(recorded, audited=True)
