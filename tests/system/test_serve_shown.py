"""What `tandem serve` shows on a terminal, from its start to Ctrl-C, with the bundled model, and what it imports.

One start for all of it, because a start is expensive.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tandem_client.services.phases import Phase
from tests.rigs.processes import child_environment
from tests.rigs.shadowed_folder import environment, ran, shadowed
from tests.rigs.terminal import CTRL_C, Terminal
from tests.rigs.waiting import TIMEOUT_SECONDS

BIN = Path(sys.executable).parent
# Colours, and those of the line that is drawn again and again.
SEQUENCES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ")


def rows(seen: str) -> list[str]:
    """The lines that stay: those that end with a line break, without what was drawn over."""
    lines = [line.rpartition("\x1b[2K")[2] for line in seen.split("\r\n")]
    return [line for line in (SEQUENCES.sub("", line).replace("\r", "") for line in lines) if line.strip()]


def pasted(line: str) -> "subprocess.CompletedProcess[str]":
    """Runs a line in a shell that finds `tandem`."""
    environment = child_environment()
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=TIMEOUT_SECONDS, check=False
    )


def ask(url: str, body: dict[str, object]) -> str:
    """The text of the first choice."""
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_a_terminal_shows_phases_then_what_to_paste_and_a_file_has_the_log(tmp_path: Path) -> None:
    """Scheduler, front end, trial of a grammar, chat's template, worker, mask server and two gateways import nothing
    from the working directory."""
    run, folder = tmp_path / "run", tmp_path / "shadowed"
    folder.mkdir()
    command = [
        str(BIN / "tandem"), "serve", "--device=cpu", "--threads=1", "--max-rows=2", "--max-length=512", "--port=0",
        "--served-name=mine", "--listen=127.0.0.1:0", "--gateway=--processes 2", "--runtime-dir", str(run),
    ]  # fmt: skip
    with Terminal(command, environment(TERM="xterm-256color"), columns=100, folder=shadowed(folder)) as terminal:
        terminal.expect(r"curl .*\r\n")
        shown = rows(terminal.seen)
        commands = [line.strip() for line in shown if line.startswith("    ")]
        answers = [pasted(line) for line in commands]
        [url] = {found[0] for line in commands if (found := re.search(r"http://[^/ ]+", line))}
        asked: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        chosen = ask(url, {**asked, "structured_outputs": {"choice": ["yes"]}})
        terminal.type(CTRL_C)
        code = terminal.expect_end()
    # Where nothing is compiled, the phase is missing.
    phases = [line[2:].rpartition("  ")[0].strip() for line in shown if line.startswith("✓ ")]
    assert [each for each in phases if each != Phase.COMPILE] == [each for each in Phase if each != Phase.COMPILE]
    assert [line for line in shown if LOG_LINE.search(line)] == []
    assert shown[1] == f"  the log of all programs is {run / 'serve.log'}"
    [ready] = [line for line in shown if line.startswith("ready after ")]
    assert re.fullmatch(r"ready after \d+\.\d s; Ctrl-C stops", ready)
    grpc, http = (re.fullmatch(r"  (?:gRPC|HTTP) at (\S+):", line) for line in shown if " at " in line)
    assert grpc is not None and http is not None
    assert commands[0] == f'tandem generate --address {grpc[1]} "Return the"'
    assert commands[1].startswith(f"curl {http[1]}/v1/completions ")
    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert answers[0].stdout.strip() and '"model":"mine"' in answers[1].stdout.replace(" ", "")
    assert code == 0 and chosen == "yes" and ran(folder) == "", terminal.seen
    assert [line for line in rows(terminal.seen)[len(shown) :] if not line.startswith("^C")] == []
    assert terminal.seen.count("stopping: ") == 1
    log = run / "serve.log"
    assert log.stat().st_mode & 0o777 == 0o600
    lines = log.read_text().splitlines()
    # The form in which they are printed without a terminal.
    assert {line.partition(" | ")[0].strip() for line in lines} >= {"scheduler", "worker", "gateway", "serve"}
    assert any(LOG_LINE.search(line) and "frontend listening on" in line for line in lines)
    assert "\x1b" not in log.read_text()
