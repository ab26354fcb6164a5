"""One signal to every process of a service, as systemd, containers and terminals send it: everything ends in order."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tandem_client import Client
from tandem_client.errors import Unavailable
from tandem_client.types import UpdateState
from tests.rigs.processes import child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS, until

# In place of the real worker, which takes seconds to start: the real link, and steps of 20 ms. It loads new weights
# while the folder has a file `slow`.
WORKER = """\
import runpy, sys
[folder] = [word.partition("=")[2] for word in sys.argv if word.startswith("--runtime-dir=")]
own = [word for word in sys.argv if word == "--exit-with-parent"]
shape = ["--max-length", "4096", "--page-size", "16", "--num-pages", "1100"]
sys.argv = ["worker", "--runtime-dir", folder, "--step-ms", "20", "--slow-file", folder + "/slow", *shape, *own]
runpy.run_module("tests.rigs.linked_worker", run_name="__main__")
"""
# Of each stream: long enough for what is looked at meanwhile, or for a signal alone.
MANY_TOKENS, FEW_TOKENS = 250, 50
_LEVEL = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback|Error:")
_WRONG_END = re.compile(r": the \w+( \d+)? (ended|was ended|did not end)")
_READY = r"ready: tandem generate"
_GRPC, _HTTP = r"frontend listening on (\S+)$", r"gateway listening on (\S+)$"


@dataclass(eq=False)
class Program:
    """A process and its lines."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list[str])
    changed: threading.Condition = field(default_factory=threading.Condition)
    has_ended: bool = False

    def read(self) -> None:
        for line in self.process.stdout or ():
            with self.changed:
                self.lines.append(line.rstrip())
                self.changed.notify_all()
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()

    def wait_line(self, pattern: str) -> str:
        """The last group of the first line that matches."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self.changed:
            self.changed.wait_for(lambda: found() or self.has_ended, TIMEOUT_SECONDS)
            assert found(), "\n".join(self.lines)
            return found()[0].group(found()[0].lastindex or 0)


class Stage:
    """A folder of sockets, and programs that are killed at the end if they still run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack, self.folder = stack, folder
        package = folder / "gpu_worker"
        package.mkdir()
        # The rest of the package is the repository's.
        (package / "__init__.py").write_text("import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n")
        (package / "__main__.py").write_text(WORKER)
        self.run = folder / "run"
        self.run.mkdir(mode=0o700)
        self.sockets = f"--runtime-dir={self.run}"
        self._environment = child_environment()
        # The folder comes before the repository, which has a real worker.
        self._environment["PYTHONPATH"] = os.pathsep.join([str(folder), self._environment["PYTHONPATH"]])

    def start(self, *command: str, group: int | None = None, within: Sequence[str] = ()) -> Program:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=self.folder, env=self._environment, process_group=group,
        )  # fmt: skip
        program = Program(process)
        reader = threading.Thread(target=program.read)
        reader.start()

        def end() -> None:
            process.kill()
            process.wait()
            reader.join()
            assert process.stdout is not None
            process.stdout.close()

        self._stack.callback(end)
        return program


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(tmp_path, stack)


@contextmanager
def streams(grpc: str, http: str, num_tokens: int = MANY_TOKENS) -> Iterator[None]:
    """Two streams that run in the body, and end after it as if nothing had happened."""
    begun, counts, failures = threading.Barrier(3), dict[str, int](), list[BaseException]()

    def over_grpc() -> None:
        with Client(grpc, max_retries=0) as client:
            for delta in client.generate([1, 7], max_new_tokens=num_tokens, ignore_eos=True):
                if "grpc" not in counts:
                    begun.wait(TIMEOUT_SECONDS)
                counts["grpc"] = counts.get("grpc", 0) + len(delta.token_ids)

    def over_http() -> None:
        body = {
            "prompt": [2, 7],
            "max_tokens": num_tokens,
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
        begun.wait(TIMEOUT_SECONDS)
        yield
    finally:
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
    assert not failures, failures
    assert counts == {"grpc": num_tokens, "http": num_tokens}


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


def check_ends(programs: Sequence[Program], others: Sequence[psutil.Process] = ()) -> None:
    for program in programs:
        assert program.process.wait(TIMEOUT_SECONDS) == 0, "\n".join(program.lines)
    _, alive = psutil.wait_procs(others, timeout=TIMEOUT_SECONDS)
    assert alive == []
    said = [line for program in programs for line in program.lines]
    assert [line for line in said if _LEVEL.search(line) or _WRONG_END.search(line)] == []


def start_serve(
    stage: Stage, *more: str, within: Sequence[str] = ()
) -> tuple[Program, str, str, psutil.Process, list[psutil.Process]]:
    """Returns it, its two addresses, its process, and those that it started."""
    flags = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--shared-pool", "on", stage.sockets]
    serve = stage.start("tandem_client.cli", "serve", *flags, *more, within=within)
    serve.wait_line(_READY)
    own = psutil.Process(serve.process.pid)
    if within:
        [own] = own.children()
    others = own.children(recursive=True)
    assert len(others) >= 5  # scheduler, front end, worker, holder, gateway
    return serve, serve.wait_line(_GRPC), serve.wait_line(_HTTP), own, others


def test_a_signal_to_every_process_of_serve_drains_it(stage: Stage) -> None:
    """Some of serve's children get the signal before it, as where systemd goes through the processes of a unit."""
    serve, grpc, http, own, others = start_serve(stage)
    with streams(grpc, http), httpx.Client(verify=False) as kept:
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
    with streams(grpc, http):
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
    assert serve.process.wait(TIMEOUT_SECONDS) == 0
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
        """The system chose the ports anew, and so the gateway is another one too."""
        return until(lambda: [match for line in serve.lines[num_lines:] if (match := re.search(pattern, line))])[-1][1]

    grpc, http = newest(_GRPC), newest(_HTTP)
    with Client(grpc) as client, httpx.Client(base_url=http, verify=False) as caller:
        client.wait_ready(TIMEOUT_SECONDS)
        until(lambda: caller.get("/v1/models").status_code == 200)
    after = own.children(recursive=True)
    assert len(after) == len(before) and all(each.status() != psutil.STATUS_ZOMBIE for each in after)
    with streams(grpc, http, FEW_TOKENS):
        own.send_signal(signal.SIGTERM)
    assert serve.process.wait(TIMEOUT_SECONDS) == 0, "\n".join(serve.lines)
    assert psutil.wait_procs({*before, *after}, timeout=TIMEOUT_SECONDS)[1] == []


def test_a_signal_to_serve_alone_drains_it(stage: Stage) -> None:
    serve, grpc, http, own, others = start_serve(stage)
    with streams(grpc, http, FEW_TOKENS):
        own.send_signal(signal.SIGINT)
    check_ends([serve], others)


def test_a_signal_to_the_group_of_programs_that_were_started_by_hand_drains_them(stage: Stage) -> None:
    """A worker must not go before the streams that it computes."""
    worker = stage.start("gpu_worker", stage.sockets, group=0)
    group = worker.process.pid
    scheduler = stage.start("scheduler_svc", "--listen", "127.0.0.1:0", stage.sockets, group=group)
    grpc = scheduler.wait_line(_GRPC)
    gateway = stage.start("tandem_client.gateway", "--listen", "127.0.0.1:0", "--address", grpc, group=group)
    http = gateway.wait_line(_HTTP)
    worker.wait_line(_READY)
    programs = [worker, scheduler, gateway]
    others = psutil.Process(scheduler.process.pid).children(recursive=True)
    with streams(grpc, http):
        # As a terminal does; the front end has a session of its own.
        os.killpg(group, signal.SIGINT)
        for program in programs:
            program.wait_line(r"stopping: .*a second signal")
        check_refusals(grpc, http)
        assert [program.process.poll() for program in programs] == [None, None, None]
    check_ends(programs, others)
