"""Signals to every process of a service, as systemd, containers and terminals send them: everything ends in order.

The first one drains the service, the second one ends it with all its processes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tandem_client import Client
from tandem_client.errors import Unavailable
from tandem_client.types import UpdateState
from tests.rigs.processes import Child, child_environment, run
from tests.rigs.streams import Caller
from tests.rigs.waiting import TIMEOUT_SECONDS, until
from tests.system.asks import Ask, send

# In place of the real worker, which takes seconds to start: the real link, and steps of 20 ms until the folder has a
# file `fast`. It loads new weights while the folder has a file `slow`.
WORKER = """\
import runpy, sys
[folder] = [word.partition("=")[2] for word in sys.argv if word.startswith("--runtime-dir=")]
own = [word for word in sys.argv if word == "--exit-with-parent"]
shape = ["--max-length", "4096", "--page-size", "16", "--num-pages", "1100"]
sys.argv = ["worker", "--runtime-dir", folder, "--step-ms", "20", *shape, *own]
sys.argv += ["--slow-file", folder + "/slow", "--fast-file", folder + "/fast"]
runpy.run_module("tests.rigs.linked_worker", run_name="__main__")
"""
# Of each stream: more than the worker computes while a test looks.
NUM_TOKENS = 250
_LEVEL = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback|Error:")
_WRONG_END = re.compile(r": the \w+( \d+)? (ended|was ended|did not end)")
_READY = r"ready: tandem generate"
_GRPC, _HTTP = r"frontend listening on (\S+)$", r"gateway listening on (\S+)$"


class Stage:
    """A folder of sockets, and programs that are killed at the end if they still run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, list[Child]()
        package = folder / "gpu_worker"
        package.mkdir()
        # The rest of the package is the repository's.
        (package / "__init__.py").write_text("import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n")
        (package / "__main__.py").write_text(WORKER)
        self.run = folder / "run"
        self.run.mkdir(mode=0o700)
        self.sockets = f"--runtime-dir={self.run}"
        # The folder comes before the repository, which has a real worker.
        self._environment = {"PYTHONPATH": os.pathsep.join([str(folder), child_environment()["PYTHONPATH"]])}

    def start(self, *command: str, **options: Any) -> Child:
        options["environment"] = self._environment | options.get("environment", {})
        self.programs.append(Child(command[0], [*command], folder=self.folder, **options))
        return self.programs[-1]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for program in stage.programs:
        program.reap()
        program.join_output()


@contextmanager
def streams(stage: Stage, grpc: str, http: str) -> Iterator[None]:
    """Two streams that run in the body, and end soon after it as if nothing had happened."""
    begun, counts, failures = threading.Barrier(3), dict[str, int](), list[BaseException]()

    def over_grpc() -> None:
        with Client(grpc, max_retries=0) as client:
            for delta in client.generate([1, 7], max_new_tokens=NUM_TOKENS, ignore_eos=True):
                if "grpc" not in counts:
                    begun.wait(TIMEOUT_SECONDS)
                counts["grpc"] = counts.get("grpc", 0) + len(delta.token_ids)

    def over_http() -> None:
        body = {
            "prompt": [2, 7],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", f"{http}/v1/completions", json=body, timeout=TIMEOUT_SECONDS) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                if "http" not in counts:
                    begun.wait(TIMEOUT_SECONDS)
                counts["http"] = counts.get("http", 0) + len(ids)

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)
            begun.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in (over_grpc, over_http)]
    for thread in threads:
        thread.start()
    try:
        try:
            begun.wait(TIMEOUT_SECONDS)
        except threading.BrokenBarrierError:
            assert not failures, failures
            raise
        yield
    finally:
        (stage.run / "fast").touch()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
    assert not failures, failures
    assert counts == {"grpc": NUM_TOKENS, "http": NUM_TOKENS}


def check_refusals(grpc: str, http: str) -> None:
    """What new callers get during a drain, also on connections that are open."""
    with httpx.Client(base_url=http, verify=False) as caller:
        for _ in range(2):
            refused = caller.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            assert refused.json()["error"]["code"] == "service_unavailable"
        health = caller.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "shutting_down")
        assert caller.get("/livez").status_code == 200
    with Client(grpc, max_retries=0) as client, pytest.raises(Unavailable, match="shutting down"):
        list(client.generate([1], max_new_tokens=1))


def check_ends(programs: Sequence[Child], others: Sequence[psutil.Process] = ()) -> None:
    for program in programs:
        assert program.wait() == 0, program.output()
        program.join_output()
    _, alive = psutil.wait_procs(others, timeout=TIMEOUT_SECONDS)
    assert alive == []
    said = [line for program in programs for line in program.lines]
    assert [line for line in said if _LEVEL.search(line) or _WRONG_END.search(line)] == []


def start_serve(
    stage: Stage, *more: str, **options: Any
) -> tuple[Child, str, str, psutil.Process, list[psutil.Process]]:
    """Returns it, its two addresses, its process, and those that it started."""
    flags = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--shared-pool", "on", stage.sockets]
    serve = stage.start("tandem_client.cli", "serve", *flags, *more, **options)
    serve.wait_line(_READY)
    own = psutil.Process(serve.pid)
    if "within" in options:
        [own] = own.children()
    others = own.children(recursive=True)
    assert len(others) >= 5  # scheduler, front end, worker, holder, gateway
    return serve, serve.wait_line(_GRPC)[1], serve.wait_line(_HTTP)[1], own, others


def test_a_signal_to_every_process_of_serve_drains_it(stage: Stage) -> None:
    """Some of serve's children get the signal before it, as where systemd goes through the processes of a unit."""
    serve, grpc, http, own, others = start_serve(stage)
    with streams(stage, grpc, http), httpx.Client(verify=False) as kept:
        assert kept.get(f"{http}/v1/models").status_code == 200
        for process in (*others[::2], own, *others[1::2]):
            process.send_signal(signal.SIGTERM)
        serve.wait_line("serve.*stopping: new requests are refused")
        serve.wait_line("gateway.*stopping: new requests get 503")
        assert kept.get(f"{http}/v1/models").status_code == 503
        check_refusals(grpc, http)
    check_ends([serve], others)


def test_a_signal_to_every_process_while_a_worker_loads_new_weights(stage: Stage) -> None:
    """The streams and the operator get what they would have got, after the loading."""
    weights, states = stage.folder / "weights" / "v1", list[UpdateState]()
    weights.mkdir(parents=True)
    serve, grpc, http, own, others = start_serve(stage, "--scheduler", f"--weights-folders {weights.parent}")

    def update() -> None:
        with Client(grpc, max_retries=0) as client:
            states.extend(each.state for each in client.update_weights(weights, version="v1"))

    operator = threading.Thread(target=update)
    with streams(stage, grpc, http):
        (stage.run / "slow").touch()
        operator.start()
        serve.wait_line("loading v1")
        for process in (*others[::2], own, *others[1::2]):
            process.send_signal(signal.SIGTERM)
        serve.wait_line("core.*stopping: new requests are refused")
        serve.wait_line("worker.*stopping: ")
        check_refusals(grpc, http)
        (stage.run / "slow").unlink()
        operator.join(TIMEOUT_SECONDS)
    assert states[-1:] == [UpdateState.DONE]
    # What is said of each update.
    serve.lines = [line for line in serve.lines if "has weights 'v1'; 2 requests go back to the queue" not in line]
    check_ends([serve], others)


def of_module(processes: Sequence[psutil.Process], module: str) -> psutil.Process:
    [found] = [each for each in processes if module in each.cmdline()]
    return found


def test_frozen_processes_are_killed_and_named(stage: Stage) -> None:
    """A worker by the scheduler that hears nothing of it, a front end with its scheduler at the second signal."""
    serve, _, _, own, others = start_serve(stage)
    for module in ("gpu_worker", "scheduler_svc.frontend"):
        of_module(others, module).send_signal(signal.SIGSTOP)
    own.send_signal(signal.SIGTERM)
    serve.wait_line("core.*stopping: new requests are refused")
    serve.wait_line("core.*killed the hung worker")
    own.send_signal(signal.SIGTERM)
    serve.wait_line("serve.*the scheduler was ended by SIGKILL")
    assert serve.wait() == 0
    assert psutil.wait_procs(others, timeout=TIMEOUT_SECONDS)[1] == []


_PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def test_serve_as_process_1_leaves_neither_zombies_nor_orphans(stage: Stage) -> None:
    """As in a container without an init. The death of the scheduler leaves its front end to process 1."""
    if sys.platform != "linux" or subprocess.run([*_PROCESS_1, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not be process 1 of others")
    serve, _, _, own, before = start_serve(stage, within=_PROCESS_1)
    num_lines = len(serve.lines)
    lost = [each for each in before if "tandem_client.gateway" not in each.cmdline()]
    for killed in [of_module(before, module) for module in ("gpu_worker", "scheduler_svc")]:
        killed.kill()
    # A zombie runs, as psutil sees it.
    until(lambda: sum(each.is_running() for each in lost) == 1, "nobody but the holder is left of them")

    def newest(pattern: str) -> str:
        """The system chose new ports, and so the gateway is another one too."""
        return until(lambda: [match for line in serve.lines[num_lines:] if (match := re.search(pattern, line))])[-1][1]

    grpc, http = newest(_GRPC), newest(_HTTP)
    with Client(grpc) as client, httpx.Client(base_url=http, verify=False) as caller:
        client.wait_ready(TIMEOUT_SECONDS)
        until(lambda: caller.get("/v1/models").status_code == 200)
    after = own.children(recursive=True)
    assert len(after) == len(before) and all(each.status() != psutil.STATUS_ZOMBIE for each in after)
    with streams(stage, grpc, http):
        own.send_signal(signal.SIGTERM)
    assert serve.wait() == 0, serve.output()
    assert psutil.wait_procs({*before, *after}, timeout=TIMEOUT_SECONDS)[1] == []


def test_a_signal_to_serve_alone_drains_it(stage: Stage) -> None:
    serve, grpc, http, own, others = start_serve(stage)
    with streams(stage, grpc, http):
        own.send_signal(signal.SIGINT)
    check_ends([serve], others)


def test_a_signal_to_the_group_of_programs_that_were_started_by_hand_drains_them(stage: Stage) -> None:
    """A worker must not go before the streams that it computes."""
    # A start in the ordinary way: what could fork it has imported torch, which this worker does not use.
    worker = stage.start("gpu_worker", stage.sockets, group=0, within=["env"])
    group = worker.pid
    scheduler = stage.start("scheduler_svc", "--listen", "127.0.0.1:0", stage.sockets, group=group)
    grpc = scheduler.wait_line(_GRPC)[1]
    gateway = stage.start("tandem_client.gateway", "--listen", "127.0.0.1:0", "--address", grpc, group=group)
    http = gateway.wait_line(_HTTP)[1]
    # The worker's own line does not say that the front end knows of it.
    with closing(Caller(grpc)) as caller:
        caller.wait_serving()
    programs = [worker, scheduler, gateway]
    others = psutil.Process(scheduler.pid).children(recursive=True)
    with streams(stage, grpc, http):
        # As a terminal does; the front end has a session of its own.
        os.killpg(group, signal.SIGINT)
        for program in programs:
            program.wait_line(r"stopping: .*a second signal")
        check_refusals(grpc, http)
        assert [program.exit_code for program in programs] == [None, None, None]
    check_ends(programs, others)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_all_streams_and_processes(stage: Stage, second: signal.Signals) -> None:
    # The first signal alone would let the streams run for an hour.
    patient = {"TANDEM_SCHEDULER_GRACE_SECONDS": "3600"}
    serve, grpc, _, own, others = start_serve(stage, environment=patient)
    caller = Caller(grpc)
    streams = send(caller, [Ask(prompt=(number, 7), max_new_tokens=4000) for number in range(4)], tokens=5)
    own.send_signal(signal.SIGTERM)
    serve.wait_line("stopping: new requests are refused")
    for stream in streams:
        stream.wait_tokens(len(stream.transcript.tokens) + 20)
    with Client(grpc, max_retries=0) as client, pytest.raises(Unavailable):
        list(client.generate([1], max_new_tokens=1))
    own.send_signal(second)
    assert serve.wait() == 0
    _, alive = psutil.wait_procs(others, timeout=TIMEOUT_SECONDS)
    assert alive == []
    streams.check_lost()
    caller.close()
    serve.wait_line("stopping now: all requests end")


def test_no_program_goes_on_without_the_one_that_started_it(stage: Stage) -> None:
    """A parent that was killed while its child started: the system then names another process as the parent."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for program in (
        ["scheduler_svc", "--listen=127.0.0.1:0", stage.sockets],
        ["gpu_worker", stage.sockets, "--device=cpu"],
        ["gpu_worker.holder", stage.sockets],
        ["tandem_client.gateway", "--listen=127.0.0.1:0"],
    ):
        done = run(*program, "--exit-with-parent", _TANDEM_PARENT=str(gone.pid))
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert list(stage.run.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("turns", range(3))
def test_a_kill_of_serve_at_its_start_leaves_no_process(stage: Stage, turns: int) -> None:
    flags = ("--listen", "127.0.0.1:0", stage.sockets, "--shared-pool", "off")
    # A start in the ordinary way: there is nothing else before its processes.
    serve = psutil.Process(stage.start("tandem_client.cli", "serve", *flags, within=["env"]).pid)
    # Later in each turn.
    while len(found := serve.children(recursive=True)) < 1 + turns:
        assert serve.is_running()
    serve.kill()
    _, left = psutil.wait_procs(found, timeout=60)
    for process in left:
        process.kill()
    assert not left, [process.cmdline() for process in left]
