"""The head of a Ray cluster on this host: its command, with health checks that find a silent node within seconds.

With Ray's own settings a node that is silent, and not dead, was noticed after more than a minute.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

# A node is given up after three checks, each of which waits at most a second.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
# Nodes go on for so long without their head, and with them their workers.
WITHOUT_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}

# In the output of `ray start`.
_ADDRESS = re.compile(r"ray start --address='?([^'\s]+)")


class HeadFailed(RuntimeError):
    """The head did not start; the message says why."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of the head's processes; what is set already stays."""
    return {**HEALTH_CHECKS, **WITHOUT_HEAD, "RAY_AUTH_MODE": "token", **given}


def head_command(ray: str, port: int) -> list[str]:
    """The command that starts the head. No work is placed on it, and it shows no dashboard."""
    return [ray, "start", "--head", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"]


def node_hint(address: str) -> str:
    """What to run on each other node."""
    settings = " ".join(f"{name}={value}" for name, value in {"RAY_AUTH_MODE": "token", **WITHOUT_HEAD}.items())
    return f"{settings} ray start --address={address}"


def ray_program() -> str:
    """The command `ray` beside this interpreter, else the one on PATH; an empty string without one."""
    beside = Path(sys.executable).with_name("ray")
    return str(beside) if beside.exists() else shutil.which("ray") or ""


def use_token(variables: MutableMapping[str, str]) -> None:
    """Sets Ray's authentication for this process if this user has a token. Called before Ray is imported."""
    own = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(variables.get(name) for name in own) or (Path.home() / ".ray" / "auth_token").exists():
        variables.setdefault("RAY_AUTH_MODE", "token")


def start_head(port: int) -> str:
    """Starts the head, with a token for its nodes. Returns its address, HOST:PORT. Raises HeadFailed."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise HeadFailed(f"port {port} is in use, perhaps by a head that runs; --port chooses another one")
    ray, variables = ray_program(), environment(os.environ)
    if variables["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in variables:
        _run([ray, "get-auth-token", "--generate"], variables)
    output = _run(head_command(ray, port), variables)
    found = _ADDRESS.search(output)
    return found.group(1) if found else f"THIS_HOST:{port}"


def _run(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Returns the command's output, stdout and stderr. Raises HeadFailed with its last line."""
    # The processes of Ray inherit stdout, so a pipe would stay open.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False)
        output.seek(0)
        text = output.read()
    if done.returncode:
        last = (text.strip().splitlines() or ["it printed nothing"])[-1]
        raise HeadFailed(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}: {last}")
    return text
