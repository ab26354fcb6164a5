"""What no line of the log and no file of the flight recorder has, at any level: texts, tokens, secrets."""

import base64
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tandem_client import Client, errors
from tests.rigs import byte_tokenizer
from tests.rigs.door import token_file
from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.waiting import TIMEOUT_SECONDS, until

TOKEN, WRONG = "tandem_zebra-token", "tandem_okapi-token"
PROMPT, STOP, SALT, MODEL = "a zebra-prompt " * 3, "zebra-stop", "zebra-salt", "zebra-model"
POISON = "zebra-poison"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARTS = {"time", "process", "pid", "level", "message"}


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_neither_texts_nor_secrets_are_logged(tmp_path: Path, log_format: str) -> None:
    with Rig() as rig:
        drawn, tokens = tmp_path / "drawn", token_file(tmp_path, {"acme": TOKEN}, rights=("inference", "control"))
        workers = [rig.worker("--nonfinite-token", str(byte_tokenizer.POISON_ID), "--step-ms", "10", late=False)]
        scheduler = rig.scheduler(
            "--tokens", str(tokens), "--log-level", "debug", "--log-format", log_format,
            program=("tests.rigs.known_secrets", str(drawn), ),
        )  # fmt: skip
        with Client(scheduler.address, token=TOKEN) as client, Client(scheduler.address, token=WRONG) as wrong:
            client.wait_ready(TIMEOUT_SECONDS)
            texts, secret = _traffic(client, wrong)
            _kill_the_worker_of_a_stream(rig, client, workers)
            # Its line is written after the call has ended.
            until(lambda: any("worker_changes=1" in line or '"worker_changes": 1' in line for line in scheduler.lines))
            before = scheduler.frontend_pid()
            os.kill(before, signal.SIGABRT)
            until(lambda: any("crash-frontend" in line for line in scheduler.lines))
        assert scheduler.terminate() == 0
        logged = "\n".join(scheduler.lines)
        files = sorted((rig.runtime_dir / "flight").iterdir())
        flights = [file for file in files if file.suffix == ".jsonl"]
        causes = ", ".join(
            cause for file in flights for cause in json.loads(file.read_text().partition("\n")[0])["causes"]
        )
        assert re.fullmatch(r"a request of \S+ failed, stream \d+, worker \S+ was lost, front end \S+ was lost", causes)
        assert all(str(file) in logged for file in files)
        assert [file.name for file in files if file.suffix != ".jsonl"] == [f"crash-frontend-{before}.txt"]
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        everything = logged + "".join(file.read_text() for file in files)
        drawn_hex = drawn.read_text().split()
        drawn_values = [base64.b64encode(bytes.fromhex(value)).decode() for value in drawn_hex]
        hidden = [TOKEN, WRONG, "zebra", "okapi", secret.hex(), repr(secret), *texts, *drawn_hex, *drawn_values]
        assert [value for value in hidden if value in everything] == []
        _check_lines(scheduler, log_format)


def _traffic(client: Client, wrong: Client) -> tuple[list[str], bytes]:
    """Requests of each outcome; returns the texts of the answers and the secret of a request that lingers."""
    texts: list[str] = []
    with pytest.raises(errors.Unauthenticated):
        list(wrong.generate(PROMPT))
    for field in ({"model": MODEL}, {"stop": STOP * 100}, {"priority": 5}, {"cache_salt": SALT * 100}):
        with pytest.raises((errors.InvalidArgument, errors.NotFound)):
            list(client.generate(PROMPT, **field))  # type: ignore[arg-type]
    stream = client.generate(
        PROMPT, stop=STOP, cache_salt=SALT, max_new_tokens=40, ignore_eos=True, temperature=0.0, linger_seconds=5.0,
        traceparent=f"00-{TRACE}-b7ad6b7169203331-01",
    )  # fmt: skip
    list(stream)
    assert stream.accepted is not None
    text = stream.samples[0].text
    # The pretend model's text is at random, so a part of it is something else by chance only if it is short.
    texts += [text[start : start + 8] for start in range(0, len(text) - 8, 8)]
    assert len(texts) > 3
    poison = [*POISON.encode(), byte_tokenizer.POISON_ID]
    with pytest.raises(errors.TandemError):
        list(client.generate(poison, max_new_tokens=4, request_id="poison"))
    left = client.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
    next(left)
    left.close()
    return texts, stream.accepted.resume_secret


def _kill_the_worker_of_a_stream(rig: Rig, client: Client, workers: list[object]) -> None:
    stream = client.generate(PROMPT, max_new_tokens=60, ignore_eos=True, request_id="moved")
    next(stream)
    workers[0].kill()  # type: ignore[attr-defined]
    rig.worker(late=False)
    list(stream)
    assert stream.summary is not None and stream.summary.timing.worker_changes == 1


def _check_lines(scheduler: SchedulerProcess, log_format: str) -> None:
    """The lines that an operator needs are there, and of the format."""
    logged = "\n".join(scheduler.lines)
    if log_format == "text":
        assert " tenant=acme outcome=length " in logged and f"trace_id={TRACE}" in logged
        assert "request_id=moved " in logged and "worker_changes=1" in logged
        assert "request refused outcome=UNAUTHENTICATED" in logged
        return
    lines = [json.loads(line) for line in scheduler.lines]
    assert all(set(line) >= PARTS for line in lines)
    requests = [line for line in lines if line["message"] in ("request ended", "request refused")]
    assert {line.get("tenant") for line in requests} == {"acme", None}
    outcomes = {line["outcome"] for line in requests}
    assert {"length", "CANCELLED", "INTERNAL", "UNAUTHENTICATED", "NOT_FOUND", "INVALID_ARGUMENT"} <= outcomes
    [moved] = [line for line in requests if line.get("request_id") == "moved"]
    assert (moved["worker_changes"], moved["output_tokens"], moved["outcome"]) == (1, 60, "length")
