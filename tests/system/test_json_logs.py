"""`tandem serve --log-format json` with the real worker: every line of every process is a JSON object of one form."""

import json
from datetime import datetime

import psutil
import pytest

from tandem_client import Client
from tests.rigs.processes import Rig
from tests.rigs.waiting import TIMEOUT_SECONDS, until

PARTS = ["time", "process", "pid", "level", "message"]


@pytest.mark.long
def test_every_line_of_every_process_parses(rig: Rig) -> None:
    command = ["serve", "--listen=127.0.0.1:0", "--device=cpu", f"--runtime-dir={rig.runtime_dir}", "--standby=1"]
    command += ["--scheduler=--log-level debug", "--worker=--log-level debug"]
    # Its output and its errors come through one pipe: what is half of a line in either spoils one of the other.
    serve = rig.start("serve", "tandem_client.cli", *command, environment={"TANDEM_LOG_FORMAT": "json"})
    with Client(serve.wait_line(r"frontend listening on ([\d.:]+)")[1]) as client:
        client.wait_ready(TIMEOUT_SECONDS)
        list(client.generate("Return the", max_new_tokens=5))
        psutil.Process(client.load().worker_pid).kill()
        list(client.generate("Return the", max_new_tokens=5, timeout=TIMEOUT_SECONDS))
    until(lambda: sum("ready: tandem generate" in line for line in serve.lines) == 2)
    assert len({line for line in serve.lines if "frontend listening on" in line}) == 1
    assert serve.terminate() == 0
    serve.join_output()
    parsed = [json.loads(line) for line in serve.lines]
    assert {"core", "frontend", "serve", "holder"} <= {line["process"] for line in parsed}
    assert any(line["process"].startswith("worker") for line in parsed)
    for line in parsed:
        assert list(line)[:5] == PARTS
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    requests = [line for line in parsed if line["message"] == "request ended"]
    assert [line["output_tokens"] for line in requests] == [5, 5]
    assert not [line for line in parsed if "Return the" in line["message"] and "tandem generate" not in line["message"]]
