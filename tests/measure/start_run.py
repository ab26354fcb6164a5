"""One start of `tandem serve`, measured: from the start of its process to the first token of a first request.

Owns the process, the reading of its log, and the first request. Every time is in seconds since the process was started.
"""

import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tandem_client import Client
from tests.measure.served import serving
from tests.rigs.processes import Child

PROMPT = "Return the"
# Longer than any cold start.
_MOST_SECONDS = 300.0
# The worker's timed phases: "model files      0.02 s".
_PHASE = re.compile(r"(.+?)\s+(\d+\.\d\d) s$")
_LISTENS = r"frontend listening on ([\d.:]+)"
_MILESTONES = {
    "the worker's first line": ("worker", re.compile(r"worker \d+ starts")),
    "the front end listens": ("core", re.compile(_LISTENS)),
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

    def read(self, lines: Sequence[str], begun: float) -> None:
        """Takes the milestones and phases of the first worker from JSON lines of the log; `begun` is a Unix time."""
        for record in [json.loads(line) for line in lines if line.startswith("{")]:
            at, message = datetime.fromisoformat(record["time"]).timestamp() - begun, record["message"]
            for name, (process, pattern) in _MILESTONES.items():
                if record["process"] == process and pattern.search(message):
                    self.milestones.setdefault(name, at)
            if record["process"] == "worker" and (phase := phase_of(message)) is not None:
                self.phases.setdefault(*phase)


def phase_of(message: str) -> tuple[str, float] | None:
    """The name and the seconds of a phase, if the message of the worker's log states one."""
    found = _PHASE.match(message)
    return None if found is None else (found[1], float(found[2]))


def measure(caches: Path | None, *, kill: bool) -> Start:
    """Starts the service in a fresh runtime folder, and sends one request as soon as it is ready.

    caches: a folder for the worker's caches, instead of the user's. kill: also kills the worker, and waits for the
    next.
    """
    flags = ["--listen", "127.0.0.1:0", "--log-format", "json", "--worker=--device cpu"]
    own = {} if caches is None else {"XDG_CACHE_HOME": str(caches), "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    start = Start()
    with tempfile.TemporaryDirectory(prefix="tandem-start-") as runtime_dir:
        begun, begun_at = time.perf_counter(), time.time()
        with serving(Path(runtime_dir), *flags, environment=own) as serve, Client(_address(serve)) as client:
            client.wait_ready(_MOST_SECONDS)
            _first_token(client)
            start.first_token = time.perf_counter() - begun
            start.cpu_seconds = _cpu_seconds(serve.pid)
            if kill:
                next(child for child in psutil.Process(serve.pid).children() if "gpu_worker" in child.cmdline()).kill()
                killed = time.perf_counter()
                _first_token(client)
                start.after_kill = time.perf_counter() - killed
        serve.join_output()
        start.read(serve.lines, begun_at)
    return start


def _address(serve: Child) -> str:
    return serve.wait_line(_LISTENS, _MOST_SECONDS).group(1)


def _first_token(client: Client) -> None:
    with client.generate(PROMPT, max_new_tokens=2, temperature=0.0, timeout=_MOST_SECONDS) as stream:
        assert any(delta.token_ids for delta in stream), "the request ended without a token"


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
