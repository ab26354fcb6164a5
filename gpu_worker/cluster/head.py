"""The head of a Ray cluster on this host: its command, with health checks that find a silent node within seconds.

With Ray's own settings a node that is silent, and not dead, was noticed after more than a minute.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# A node is given up after three checks, each of which waits at most a second.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
# Nodes go on for so long without their head, and with them their workers.
WITHOUT_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}


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


def start_head(port: int) -> int:
    """Starts the head, with a token for its nodes. Returns the exit code of `ray start`."""
    ray, variables = ray_program(), environment(os.environ)
    if variables["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in variables:
        subprocess.run([ray, "get-auth-token", "--generate"], env=variables, stdout=subprocess.DEVNULL, check=True)
    return subprocess.run(head_command(ray, port), env=variables, check=False).returncode
