"""A Ray cluster on this machine: a head and nodes, each with a raylet of its own, which can be killed or frozen.

Owns the processes of Ray and the folder of their session. Leaving the context ends all of them, workers included.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from ray._common.utils import get_ray_address_file, reset_ray_address
from ray.cluster_utils import Cluster

from tests.rigs.processes import REPOSITORY
from tests.rigs.waiting import until

# The head takes no work.
_HEAD = {"num_cpus": 0, "include_dashboard": False}
COMMAND_SECONDS = 120.0


class LocalCluster:
    """A head and `count` nodes of two CPUs."""

    def __init__(self, count: int = 2) -> None:
        self._count = count
        self.nodes: list[Any] = []
        self.folder = tempfile.mkdtemp(prefix="ray")

    def __enter__(self) -> "LocalCluster":
        Path(get_ray_address_file(None)).parent.mkdir(exist_ok=True)
        try:
            self._cluster = Cluster(initialize_head=True, head_node_args={**_HEAD, "temp_dir": self.folder})
            self.nodes = [self.add() for _ in range(self._count)]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        mine = [process for process in psutil.process_iter(["cmdline"]) if self._is_mine(process)]
        mine += [child for process in mine for child in _descendants(process)]
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(mine, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)
        # The file by which other programs of this machine would find the cluster.
        reset_ray_address()

    def _is_mine(self, process: psutil.Process) -> bool:
        return any(self.folder in argument for argument in process.info["cmdline"] or [])

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return self._cluster.address

    def add(self) -> Any:
        """Adds a node."""
        node = self._cluster.add_node(num_cpus=2, temp_dir=self.folder)
        if node not in self.nodes:
            self.nodes.append(node)
        return node

    def node_of(self, pid: int) -> Any:
        """The node on which a process runs."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        [found] = [node for node in self.nodes if _raylet(node).pid in above]
        return found

    def kill(self, node: Any) -> None:
        """Ends everything that runs on the node at once, as a power cut does."""
        self.nodes.remove(node)
        for process in _of_node(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def freeze(self, node: Any) -> list[psutil.Process]:
        """Stops everything that runs on the node, which then is silent. Returns the processes."""
        self.nodes.remove(node)
        found = _of_node(node)
        for process in found:
            process.suspend()
        return found

    def kill_head(self) -> None:
        """Ends the head's server, which knows the cluster."""
        for process in psutil.process_iter(["cmdline", "name"]):
            if process.info["name"] == "gcs_server" and self._is_mine(process):
                process.kill()
                process.wait(10)

    def command(self, *arguments: str, code: int | None = 0) -> str:
        """Runs `python -m gpu_worker.cluster`; returns its output. `code`: the expected exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "gpu_worker.cluster", arguments[0], "--address", self.address, *arguments[1:]],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=dict(os.environ),
            timeout=COMMAND_SECONDS,
            check=False,
        )
        output = done.stdout + done.stderr
        assert code is None or done.returncode == code, f"exit code {done.returncode}\n{output}"
        return output

    def status(self) -> list[dict[str, Any]]:
        """The reports of all workers."""
        lines = self.command("status", "--json", code=None).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_status(self, what: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Waits until the reports satisfy `what`, by asking."""
        return until(lambda: (found := self.status()) and what(found) and found, "reports of workers")


def _raylet(node: Any) -> psutil.Process:
    [raylet] = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid)


def _of_node(node: Any) -> list[psutil.Process]:
    raylet = _raylet(node)
    return [raylet, *_descendants(raylet)]


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def resume(processes: list[psutil.Process]) -> None:
    """Lets frozen processes go on."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
