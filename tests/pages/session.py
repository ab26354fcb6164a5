"""The commands of a page as one session of a shell, in a network of its own, where the default ports are free.

A command that serves runs on in the background, as in another terminal, until the next block that starts one. Each
block is a new terminal with `.venv` active: what it exports of Tandem's variables ends with it.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.pages.blocks import ROOT, Block
from tests.rigs.waiting import TIMEOUT_SECONDS

# Of some thirty commands and starts, each of which may take long on a slow machine.
_SESSION_SECONDS = 4 * TIMEOUT_SECONDS
# What serves, and the line after which it does.
_SERVERS = {
    r"make serve|tandem serve": "ready: ",
    r"make run-scheduler": "frontend listening on ",
    r"make run-worker": "joined the scheduler",
}
_FUNCTIONS = """
set -eu -o pipefail
servers=()
stop() {
    for each in ${servers[@]+"${servers[@]}"}; do kill -TERM "$each" 2>/dev/null || true; done
    for each in ${servers[@]+"${servers[@]}"}; do wait "$each" || true; done
    servers=()
}
ready() {
    until grep -Eqs "$1" "$2"; do
        kill -0 "${servers[-1]}" || { cat "$2"; exit 1; }
        sleep 0.1
    done
}
trap stop EXIT
source .venv/bin/activate
"""


def script(blocks: Sequence[Block], first: Sequence[str] = ()) -> str:
    """The session of all blocks that are run, each of which says its name before it begins; first: lines before all."""
    lines = [_FUNCTIONS, *(line for given in first for line in _line(given, 0))]
    for number, block in enumerate(blocks, start=1):
        if block.reason:
            continue
        lines.append(f"echo; echo {_quoted(f'== {block.name}')}")
        if block.kind == "python":
            lines.append(f"python - <<'END OF THE PROGRAM'\n{block.text}END OF THE PROGRAM")
            continue
        commands = re.sub(r"\\\n\s*", "", block.text).splitlines()
        if any(map(_pattern, commands)):
            lines.append("stop")
        lines += [line for part, command in enumerate(commands) for line in _line(command, 100 * number + part)]
        lines.append('for each in "${!TANDEM_@}"; do unset "$each"; done')
    return "\n".join(lines) + "\n"


def _pattern(command: str) -> str | None:
    return next((pattern for names, pattern in _SERVERS.items() if re.match(rf"({names})\b", command)), None)


def _line(command: str, number: int) -> Iterator[str]:
    if (pattern := _pattern(command)) is None:
        # A conversation without a terminal is one message.
        given = "<<<Hello" if command.startswith("tandem chat") else "</dev/null"
        yield f"{command.partition('  #')[0]} {given}"
        return
    log = f"server-{number}.log"
    yield f"( exec {command.partition('  #')[0]} ) </dev/null >{log} 2>&1 & servers+=($!)"
    yield f"ready {_quoted(pattern)} {log}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def why_not() -> str:
    """Why this machine runs no session, or an empty string."""
    if shutil.which("ip") is None or shutil.which("curl") is None:
        return "needs iproute2 and curl"
    done = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], check=False, capture_output=True)
    return "" if done.returncode == 0 else f"this machine allows no network namespace: {done.stderr.decode().strip()}"


def run(text: str, folder: Path, short: Path) -> str:
    """Runs a session in a copy of the checkout by links. Returns its output; raises AssertionError if a line fails.

    folder: empty, for the copy and the home; short: a folder with a path that is short enough for sockets.
    """
    checkout, home = folder / "checkout", folder / "home"
    checkout.mkdir()
    home.mkdir()
    for entry in ROOT.iterdir():
        (checkout / entry.name).symlink_to(entry)
    (checkout / "session.sh").write_text(text)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    # Kernels are those that the other tests have compiled.
    kept |= {"HOME": str(home), "XDG_RUNTIME_DIR": str(short), "XDG_CACHE_HOME": cache, "PYTHONUNBUFFERED": "1"}
    command = ["unshare", "--net", "bash", "-c", "ip link set lo up && exec bash session.sh"]
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_SESSION_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    logs = "\n".join(f"-- {path.name}\n{path.read_text()}" for path in sorted(checkout.glob("server-*.log")))
    assert process.returncode == 0, f"{output}\n{logs}"
    return output
