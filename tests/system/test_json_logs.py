"""`tandem serve --log-format json` with the real worker: every line of every process is a JSON object of one form."""

import json
import subprocess
import sys
import threading
from datetime import datetime

import psutil
import pytest

from tandem_client import Client
from tests.rigs.processes import REPOSITORY, Rig, child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS

PARTS = ["time", "process", "pid", "level", "message"]


@pytest.mark.long
def test_every_line_of_every_process_parses(rig: Rig) -> None:
    command = [
        *(sys.executable, "-m", "tandem_client.cli", "serve", "--listen", "127.0.0.1:0", "--device", "cpu"),
        *("--runtime-dir", str(rig.runtime_dir), "--standby", "1", "--scheduler", "--log-level debug"),
        *("--worker", "--log-level debug"),
    ]
    # Both streams alone, so that neither can hide in the other.
    serve = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env=child_environment() | {"TANDEM_LOG_FORMAT": "json"},
    )  # fmt: skip
    assert serve.stdout is not None and serve.stderr is not None
    lines: list[str] = []
    errors: list[str] = []
    listening, ready_twice = threading.Event(), threading.Event()

    def read() -> None:
        for line in serve.stdout or ():
            lines.append(line)
            if "frontend listening on" in line:
                listening.set()
            if sum("ready: tandem generate" in one for one in lines) == 2:
                ready_twice.set()

    threads = [threading.Thread(target=read), threading.Thread(target=lambda: errors.extend(serve.stderr or ()))]
    for thread in threads:
        thread.start()
    try:
        assert listening.wait(TIMEOUT_SECONDS)
        [address] = {json.loads(line)["message"].split()[-1] for line in lines if "frontend listening on" in line}
        with Client(address) as client:
            client.wait_ready(TIMEOUT_SECONDS)
            list(client.generate("Return the", max_new_tokens=5))
            psutil.Process(client.load().worker_pid).kill()
            list(client.generate("Return the", max_new_tokens=5, timeout=TIMEOUT_SECONDS))
        assert ready_twice.wait(TIMEOUT_SECONDS)
    finally:
        serve.terminate()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        assert serve.wait(TIMEOUT_SECONDS) == 0
        serve.stdout.close()
        serve.stderr.close()
    parsed = [json.loads(line) for line in lines + errors]
    assert {"core", "frontend", "serve", "holder"} <= {line["process"] for line in parsed}
    assert any(line["process"].startswith("worker") for line in parsed)
    for line in parsed:
        assert list(line)[:5] == PARTS
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    requests = [line for line in parsed if line["message"] == "request ended"]
    assert [line["output_tokens"] for line in requests] == [5, 5]
    assert not [line for line in parsed if "Return the" in line["message"] and "tandem generate" not in line["message"]]
