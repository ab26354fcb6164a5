"""One start of `tandem serve`, measured: from the start of its process to the first token of a first request.

Owns the process, the reading of its log, and the first request. Every time is in seconds since the process was started.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tandem_client import Client
from tests.rigs.processes import REPOSITORY, child_environment

PROMPT = "Return the"
# Longer than any cold start.
_MOST_SECONDS = 300.0
# The worker's timed phases: "model files      0.02 s".
_PHASE = re.compile(r"(.+?)\s+(\d+\.\d\d) s$")
_MILESTONES = {
    "the worker's first line": ("worker", re.compile(r"worker \d+ starts")),
    "the front end listens": ("core", re.compile(r"frontend listening on (\S+)")),
    "the worker has joined": ("core", re.compile(r"worker \S+ joined")),
    "the front end serves": ("frontend", re.compile(r"^serving ")),
}


@dataclass(slots=True, kw_only=True)
class Start:
    """The times of one start."""

    first_token: float = 0.0
    milestones: dict[str, float] = field(default_factory=dict[str, float])
    # Of the worker, as its log states them.
    phases: dict[str, float] = field(default_factory=dict[str, float])
    # CPU seconds until the first token, with all threads and with processes that have ended.
    cpu_seconds: dict[str, float] = field(default_factory=dict[str, float])
    # From the end of the first worker to the first token that the next one computes.
    after_kill: float | None = None


def phase_of(message: str) -> tuple[str, float] | None:
    """The name and the seconds of a phase, if the message of the worker's log states one."""
    found = _PHASE.match(message)
    return None if found is None else (found[1], float(found[2]))


class _Log:
    """The JSON lines of `tandem serve`, read by a thread; times count from `begun`, a Unix time."""

    def __init__(self, process: subprocess.Popen[str], begun: float) -> None:
        self.start = Start()
        self.address = ""
        self.lines: list[str] = []
        self._begun = begun
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            if line.startswith("{"):
                self._note(json.loads(line))
        self._listening.set()

    def _note(self, record: dict[str, str]) -> None:
        message = record["message"]
        at = datetime.fromisoformat(record["time"]).timestamp() - self._begun
        for name, (process, pattern) in _MILESTONES.items():
            if record["process"] != process or name in self.start.milestones:
                continue
            if (found := pattern.search(message)) is not None:
                self.start.milestones[name] = at
                if found.groups():
                    self.address = found[1]
                    self._listening.set()
        if record["process"] == "worker" and (phase := phase_of(message)) is not None:
            # A worker that starts after a kill logs the same phases.
            self.start.phases.setdefault(*phase)

    def wait_address(self) -> str:
        """Waits until the front end listens. Raises AssertionError with the log if it does not."""
        self._listening.wait(_MOST_SECONDS)
        assert self.address, "the service did not start:\n" + "".join(self.lines)
        return self.address


@contextmanager
def _service(runtime_dir: str, caches: Path | None, worker_flags: str) -> Iterator[tuple[subprocess.Popen[str], _Log]]:
    environment = child_environment()
    if caches is not None:
        environment |= {"XDG_CACHE_HOME": str(caches)}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    flags = ["--listen", "127.0.0.1:0", "--runtime-dir", runtime_dir, "--log-format", "json"]
    begun = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem_client.cli", "serve", *flags, f"--worker={worker_flags}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=REPOSITORY,
        env=environment,
        text=True,
    )
    try:
        yield process, _Log(process, begun)
    finally:
        process.terminate()
        process.wait()


def measure(*, caches: Path | None = None, worker_flags: str = "--device cpu", kill: bool = False) -> Start:
    """Starts the service in a fresh runtime folder, and sends one request as soon as it is ready.

    caches: a folder for the worker's caches, instead of the user's. kill: also kills the worker, and waits for the
    next.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-start-") as runtime_dir:
        begun = time.perf_counter()
        with _service(runtime_dir, caches, worker_flags) as (process, log), Client(log.wait_address()) as client:
            client.wait_ready(_MOST_SECONDS)
            _first_token(client)
            start = log.start
            start.first_token = time.perf_counter() - begun
            start.cpu_seconds = _cpu_seconds(process.pid)
            if kill:
                _worker_of(process.pid).kill()
                killed = time.perf_counter()
                _first_token(client)
                start.after_kill = time.perf_counter() - killed
        return start


def _first_token(client: Client) -> None:
    with client.generate(PROMPT, max_new_tokens=2, temperature=0.0, timeout=_MOST_SECONDS) as stream:
        assert any(delta.token_ids for delta in stream), "the request ended without a token"


def _worker_of(pid: int) -> psutil.Process:
    return next(child for child in psutil.Process(pid).children() if "gpu_worker" in child.cmdline())


def _cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time of each process so far, by its program."""
    names = {"gpu_worker": "worker", "scheduler_svc": "scheduler", "scheduler_svc.frontend": "front end"}
    found: dict[str, float] = {}
    serve = psutil.Process(pid)
    for process in (serve, *serve.children(recursive=True)):
        name = "serve" if process.pid == pid else next((names[a] for a in process.cmdline() if a in names), "others")
        times = process.cpu_times()
        own = times.user + times.system
        # Of the children that have ended: compilers, for example.
        ended = times.children_user + times.children_system if name == "worker" else 0.0
        found[name] = found.get(name, 0.0) + own + ended
    return found
