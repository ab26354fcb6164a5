"""`python -m gpu_worker.cluster`: places workers on a Ray cluster, shows them, changes their number, ends them.

Owns the commands' names, help and exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted. And the head of a
cluster on this host: Ray's own command, with checks that find a silent node within seconds, where Ray takes a minute.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from gpu_worker.cluster.fleet import ClusterFailed, Fleet, Named, Sized
from tandem_contract.settings import Program, SettingError, number
from tandem_contract.version import how_to_install

_PROGRAM = "python -m gpu_worker.cluster"
_HELP = f"""\
usage: {_PROGRAM} COMMAND [FLAG ...]

Place workers on the machines of a Ray cluster. Ray starts their processes, and starts them again on a node
that is left; plans, tokens, weights and keys never pass through it.

commands ({_PROGRAM} COMMAND --help lists the flags):
  head      start a cluster with this host as its head
  up        place workers; flags of the worker follow --
  status    show each worker
  scale N   change the number of workers
  retry     start those again that were given up
  down      end all workers of the fleet

Each node needs Tandem with the extras worker and ray, the model, and a folder of keys at the same path (`tandem keys`).
Run these commands on a node of the cluster.
"""
# Nodes go on for so long without their head, and with them their workers.
_OF_NODES = {"RAY_AUTH_MODE": "token", "RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
# A node is given up after three checks, each of which waits at most a second.
_CHECKS = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3"}


class _Head(BaseModel):
    port: int = number(6379, 1, 65535, "PORT", "port of the head")


class _Status(Named):
    as_json: bool = Field(False, alias="json", description="print one JSON object per worker")


_COMMANDS: dict[str, type[BaseModel]] = {
    "head": _Head, "up": Fleet, "status": _Status, "scale": Sized, "retry": Named, "down": Named,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    try:
        command, settings = parse(arguments)
        if importlib.util.find_spec("ray") is None:
            raise ClusterFailed(f"it needs Ray: {how_to_install('ray')}, on every node of the cluster")
        if isinstance(settings, _Head):
            return start_head(settings.port, os.environ)
        use_token(os.environ)
        from gpu_worker.cluster import ray_workers

        return ray_workers.carry_out(command, settings)
    except (ValueError, ClusterFailed) as error:
        print(f"gpu_worker.cluster: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("interrupted; the workers go on, and `status` shows them", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str]) -> tuple[str, BaseModel]:
    """Returns the command and its flags, all of them checked. Raises ValueError; --help raises SystemExit."""
    command, *given = arguments or ("--help",)
    if command in ("-h", "--help"):
        print(_HELP, end="")
        raise SystemExit(0)
    if command not in _COMMANDS:
        raise SettingError(f"there is no command {command}; it must be one of {', '.join(_COMMANDS)}")
    place = given.index("--") if "--" in given else len(given)
    own_words, of_worker = given[:place], given[place + 1 :]
    if of_worker and command != "up":
        raise SettingError(f"{command} takes no flags of the worker after --")
    if command == "scale":
        # Its number is the word that is neither a flag nor a flag's value.
        values = {n + 1 for n, word in enumerate(own_words) if word[:1] == "-" and "=" not in word}
        place = next((n for n, word in enumerate(own_words) if word[:1] != "-" and n not in values), len(own_words))
        own_words.insert(place, "--workers")
    program = Program(command=f"{_PROGRAM} {command}", model=_COMMANDS[command], description=_HELP.split("\n\n")[1])
    settings = program.read(own_words, {})
    if isinstance(settings, Fleet):
        return command, settings.model_copy(update={"flags": tuple(of_worker)}).checked()
    return command, settings


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of the head's processes; what is set already stays."""
    return {**{f"RAY_health_check_{name}": value for name, value in _CHECKS.items()}, **_OF_NODES, **given}


def use_token(variables: MutableMapping[str, str]) -> None:
    """Sets Ray's authentication for this process if this user has a token. Called before Ray is imported."""
    of_user = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(variables.get(name) for name in of_user) or (Path.home() / ".ray" / "auth_token").exists():
        variables.setdefault("RAY_AUTH_MODE", "token")


def start_head(port: int, given: Mapping[str, str]) -> int:
    """Starts the head, with a token for its nodes; Ray prints their command. Raises ClusterFailed."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ClusterFailed(f"port {port} is in use, perhaps by a head that runs; --port chooses another one")
    # Beside this interpreter, else on PATH.
    beside, variables = Path(sys.executable).with_name("ray"), environment(given)
    ray = str(beside) if beside.exists() else shutil.which("ray") or "ray"
    # No work is placed on it, and it shows no dashboard. The token itself is not shown.
    commands = {("start", "--head", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"): None}
    if variables["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in variables:
        commands = {("get-auth-token", "--generate"): subprocess.DEVNULL, **commands}
    for command, output in commands.items():
        if code := subprocess.call([ray, *command], env=variables, stdout=output):
            raise ClusterFailed(f"`ray {' '.join(command)}` failed with exit code {code}")
    print(
        "on each other node, with a copy of ~/.ray/auth_token (mode 0600), before that command: "
        f"export {' '.join(f'{name}={value}' for name, value in _OF_NODES.items())}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
