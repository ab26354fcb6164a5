"""Real processes for tests: the scheduler service, checking workers, and their output.

Owns starting, killing and collecting processes, and the final check that none is left and no worker received a wrong
plan. Knows nothing of requests. Every wait has a time limit.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.rigs import preloaded
from tests.rigs.preloaded import Popen, Server, kind_of
from tests.rigs.streams import Caller
from tests.rigs.waiting import TIMEOUT_SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
_FRONT_END = "scheduler_svc.frontend"
_LISTENING = re.compile(r"frontend listening on (\S+:\d+)")


def free_address() -> str:
    """A loopback address with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def child_environment(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a test's child, without any of Tandem's settings. What PYTHONPATH names now comes last."""
    kept = {name: value for name, value in given.items() if not name.startswith("TANDEM_")}
    ours = [str(REPOSITORY), str(REPOSITORY / "client"), str(REPOSITORY / "protos"), str(REPOSITORY / ".stubs")]
    kept["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [kept.get("PYTHONPATH")])])
    kept["PYTHONUNBUFFERED"] = "1"
    return kept


# Whether programs are forked from one that has imported, which takes a second less and more memory. Only what checks
# behaviour sets it: measurements start programs as a user does.
may_fork = False


@cache
def _server(kind: str) -> Server:
    base = preloaded.base_of(kind)
    # Not with what the test that is the first to need it has changed.
    environment = child_environment(preloaded.environment or os.environ)
    return Server(environment, REPOSITORY, kind, None if base is None else _server(base))


def server_of(arguments: Sequence[str], environment: Mapping[str, str]) -> Server | None:
    """What forks a program of these arguments, None if it is to be started."""
    kind = kind_of(arguments) if may_fork else None
    return server if kind and (server := _server(kind)).can_fork(environment) else None


def popen(
    *arguments: str, within: Sequence[str] = (), python: str = sys.executable, **options: Any
) -> "subprocess.Popen[Any]":
    """Starts `python -m` with the arguments: forks it, if it can be forked. `within` comes before the command.

    Without other options it has the environment and the folder of a test's child, and no input.
    """
    options = {"stdin": subprocess.DEVNULL, "cwd": REPOSITORY, "env": child_environment()} | options
    command = [*within, python, "-m", *arguments]
    server = server_of(arguments, options["env"]) if command[0] == sys.executable else None
    return subprocess.Popen(command, **options) if server is None else Popen(server, command, **options)


def run(
    *arguments: str,
    text: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    stdout: Any = subprocess.PIPE,
    **variables: str,
) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m` with the arguments to its end. It reads the text, if there is one.

    `env`: its environment, by default that of a test's child; `variables` come on top.
    """
    ends = {"stdin": subprocess.DEVNULL if text is None else subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**(child_environment() if env is None else env), **variables}
    with popen(*arguments, env=environment, cwd=cwd, text=True, stdout=stdout, **ends) as process:
        try:
            output, errors = process.communicate(text, timeout=TIMEOUT_SECONDS)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def forking(program: str) -> AbstractContextManager[None]:
    """Has `subprocess` fork a program without torch instead of starting it."""
    return preloaded.forking(_server("without torch"), program) if may_fork else nullcontext()


class Child:
    """A process; a thread appends its output, stdout and stderr together, to `lines`."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        within: Sequence[str] = (),
        folder: Path = REPOSITORY,
        group: int | None = None,
    ) -> None:
        """Starts `python -m` with the arguments. `within` comes before them: a command that becomes another one.

        It runs in the folder, and in this group of processes: 0 is a new one.
        """
        self.name = name
        self.lines: list[str] = []
        self.killed = False
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] = popen(
            *arguments, within=within, python=python, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
            env=child_environment() | (environment or {}), text=True, errors="replace", process_group=group,
        )  # fmt: skip
        self._drained = False
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._drained = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return f"--- {self.name} (pid {self.pid}) ---\n" + "\n".join(self.lines)

    def wait_line(self, pattern: str, seconds: float = TIMEOUT_SECONDS, *, after: int = 0) -> re.Match[str]:
        """Waits for a line that matches the pattern, from line number `after` on."""
        expression = re.compile(pattern)
        seen = after

        def found() -> re.Match[str] | None:
            nonlocal seen
            while seen < len(self.lines):
                match = expression.search(self.lines[seen])
                if match:
                    return match
                seen += 1
            return None

        with self._changed:
            match = self._changed.wait_for(lambda: found() or self._drained, seconds)
        if not isinstance(match, re.Match):
            state = "ended" if self._drained else f"printed none in {seconds} s"
            raise AssertionError(f"no line matches {pattern!r}: {self.name} {state}\n{self.output()}")
        return match

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self.killed = True
        self._process.kill()
        self.wait()

    def reap(self) -> None:
        """Kills the process if it still runs, and waits for its end, without an error."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TIMEOUT_SECONDS)

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """Waits for the process to end. Returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds} s\n{self.output()}") from None

    def join_output(self, seconds: float = TIMEOUT_SECONDS) -> None:
        """Waits until its output is closed, by its own children, too."""
        self._thread.join(seconds)

    def terminate(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """Sends SIGTERM and waits for the end. Returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)


class SchedulerProcess(Child):
    """`python -m scheduler_svc`, which starts its front end itself."""

    @property
    def address(self) -> str:
        """The address of the newest front end."""
        found = [match.group(1) for line in self.lines if (match := _LISTENING.search(line))]
        return found[-1] if found else self.wait_line(_LISTENING.pattern).group(1)

    def frontends(self) -> list[psutil.Process]:
        """The front ends that live."""
        children = psutil.Process(self.pid).children()
        return [each for each in children if each.status() != psutil.STATUS_ZOMBIE and _FRONT_END in each.cmdline()]

    def frontend_pid(self) -> int:
        [frontend] = self.frontends()
        return frontend.pid

    def kill_with_frontends(self, seconds: float = TIMEOUT_SECONDS) -> None:
        """Sends SIGKILL to it alone, and waits until its front ends have ended, so that their port is free."""
        process = psutil.Process(self.pid)
        # A stopped scheduler starts no front end, so this list is complete.
        process.suspend()
        frontends = process.children(recursive=True)
        self.kill()
        _, alive = psutil.wait_procs(frontends, timeout=seconds)
        assert not alive, f"front ends outlive their scheduler: {alive}"


def ranks_of(launcher: Child) -> list[psutil.Process]:
    """The processes of a group of ranks on this host, the leader first."""
    found = [each for each in psutil.Process(launcher.pid).children() if "-P" in each.cmdline()]
    return sorted(found, key=lambda each: (each.create_time(), each.pid))


class Rig:
    """A runtime directory and the processes that use it. Leaving the context ends them and checks their behaviour."""

    def __init__(self) -> None:
        # Not pytest's tmp_path, because a socket's path is limited to 107 bytes.
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="tandem-rig-"))
        self.violations_file = self.runtime_dir / "violations.txt"
        self._slow_file = self.runtime_dir / "slow"
        self.children: list[Child] = []
        self.callers: list[Caller] = []
        self._seed = 0

    @staticmethod
    def kill_serving(caller: Caller, workers: list[Child]) -> None:
        """Kills the serving one of `workers` with SIGKILL, once one serves, and waits until the service notices.

        Of several the one that runs most requests.
        """
        load = caller.wait_load(lambda load: load.worker_pid != 0)
        pid = max(load.per_worker, key=lambda worker: (worker.running, worker.pid == load.worker_pid)).pid
        [serving] = [worker for worker in workers if worker.pid == pid]
        workers.remove(serving)
        serving.kill()
        caller.wait_load(lambda load: pid not in [worker.pid for worker in load.per_worker])

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, _: object, error: BaseException | None, *trace: object) -> None:
        try:
            if error is None:
                self._end_all()
                self._check()
            else:
                # The processes are killed: waiting for them could raise another error, which would hide this one.
                self._close_callers()
                print("\n".join(child.output() for child in self.children))
                print("violations:", self.violations())
        finally:
            for pid in self._left_behind():
                os.kill(pid, signal.SIGKILL)
            for child in self.children:
                # None is left for the warnings of a later test.
                child.reap()
            shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def start(self, name: str, *arguments: str, **options: Any) -> Child:
        """Starts a program as `Child` does, without waiting for it."""
        child = Child(name, [*arguments], **options)
        self.children.append(child)
        return child

    def launch_scheduler(
        self,
        *flags: str,
        listen: str = "127.0.0.1:0",
        program: Sequence[str] = ("scheduler_svc",),
        within: Sequence[str] = (),
    ) -> SchedulerProcess:
        """Starts a scheduler without waiting for it. `program` is the module that runs it, with its arguments."""
        number = sum(isinstance(child, SchedulerProcess) for child in self.children)
        arguments = [*program, "--runtime-dir", str(self.runtime_dir), "--listen", listen, *flags]
        child = SchedulerProcess(f"scheduler {number}", arguments, within=within)
        self.children.append(child)
        return child

    def scheduler(self, *flags: str, **options: Any) -> SchedulerProcess:
        """Starts a scheduler and waits until its front end listens. Options: as those of `launch_scheduler`."""
        child = self.launch_scheduler(*flags, **options)
        child.wait_line(_LISTENING.pattern)
        return child

    def worker(
        self,
        *flags: str,
        late: bool = True,
        seed: int | None = None,
        within: Sequence[str] = (),
        program: str = "tests.rigs.checking_worker",
    ) -> Child:
        """Starts a worker without waiting for it. `late` makes it apply plans and answer with random delays."""
        self._seed += 1
        arguments = [program, "--runtime-dir", str(self.runtime_dir)]
        arguments += ["--violations", str(self.violations_file), "--exit-with-parent"]
        if not within:
            # What comes before the command may bring code of another version, which does not know the flag.
            arguments += ["--slow-file", str(self._slow_file)]
        arguments += flags
        if late:
            arguments += ["--lateness", str(self._seed if seed is None else seed)]
        return self.start(f"worker {self._seed}", *arguments, within=within)

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Steps of checking workers are slow within, so that no stream ends there."""
        self._slow_file.touch()
        try:
            yield
        finally:
            self._slow_file.unlink(missing_ok=True)

    def real_worker(self, *flags: str, program: str = "gpu_worker", **options: Any) -> Child:
        """Starts the real worker on a CPU, with one thread, without waiting for it."""
        where = ("--runtime-dir", str(self.runtime_dir), "--device", "cpu", "--threads", "1", "--exit-with-parent")
        options["environment"] = {"OMP_NUM_THREADS": "1"} | options.get("environment", {})
        return self.start(f"worker {len(self.children)}", program, *where, *flags, **options)

    def holder(self) -> Child:
        """Starts a holder of pools, and waits until it holds them."""
        holder = self.start("holder", "gpu_worker.holder", "--runtime-dir", str(self.runtime_dir), "--exit-with-parent")
        holder.wait_line("holds pools")
        return holder

    def check_record(self, path: Path, seconds: float = TIMEOUT_SECONDS, *, audited: bool = False) -> None:
        """Replays a stopped scheduler's event log through a fresh core; the effects and the states must be the same.

        `audited`: and every invariant holds after each event, which takes several times as long.
        """
        flags = ["--audit"] if audited else []
        replay = self.start("replay", "scheduler_svc.recording.replay", *flags, str(path))
        assert replay.wait(seconds) == 0, replay.output()
        replay.wait_line("gave the same effects")

    def caller(self, scheduler: SchedulerProcess, options: Sequence[tuple[str, int]] = ()) -> Caller:
        """Opens a channel to the scheduler's front end; the rig closes it."""
        caller = Caller(scheduler.address, options)
        self.callers.append(caller)
        return caller

    def ready_caller(self, scheduler: SchedulerProcess) -> Caller:
        """Opens a channel, and waits until the service serves."""
        caller = self.caller(scheduler)
        caller.wait_serving()
        return caller

    def serve(
        self, *worker_flags: str, scheduler_flags: tuple[str, ...] = (), late: bool = True
    ) -> tuple[SchedulerProcess, Child, Caller]:
        """Starts a scheduler, a worker and a caller, and waits until they serve."""
        worker = self.worker(*worker_flags, late=late)
        scheduler = self.scheduler(*scheduler_flags)
        return scheduler, worker, self.ready_caller(scheduler)

    def violations(self) -> list[str]:
        """The errors that workers found in their plans."""
        return self.violations_file.read_text().splitlines() if self.violations_file.exists() else []

    def _close_callers(self) -> None:
        for caller in self.callers:
            caller.close()

    def _end_all(self) -> None:
        self._close_callers()
        for kind in (SchedulerProcess, Child):
            for child in self.children:
                if isinstance(child, kind):
                    child.signal(signal.SIGTERM)
                    # A test that failed may have left it stopped.
                    child.signal(signal.SIGCONT)
            for child in self.children:
                if isinstance(child, kind):
                    child.wait()

    def _left_behind(self) -> list[int]:
        """Live processes that were started for this directory."""
        mark, found = str(self.runtime_dir), []
        for process in psutil.process_iter():
            try:
                ours = any(mark in argument for argument in process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _check(self) -> None:
        assert self.violations() == [], "\n".join(self.violations())
        # A killed scheduler's front end needs some time to notice.
        limit = time.monotonic() + TIMEOUT_SECONDS
        while (left := self._left_behind()) and time.monotonic() < limit:
            psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], timeout=0.2)
        assert not left, f"processes still run: {left}"
        for child in self.children:
            child.join_output()
            output = child.output()
            assert "Traceback" not in output, output
            if not child.killed:
                expected = (0, 3) if not isinstance(child, SchedulerProcess) else (0,)
                assert child.exit_code in expected, f"exit code {child.exit_code}\n{output}"


def no_threads() -> AbstractContextManager[object]:
    """Lets the system refuse further threads of Python, as at the limit of a container's processes."""
    return mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
