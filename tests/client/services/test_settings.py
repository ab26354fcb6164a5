"""What the programs read of their flags, before any of them starts."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem_client.services import settings
from tandem_client.services.gateway import asks_for_proofs, health_flags
from tandem_client.services.settings import GATEWAY, SCHEDULER, WORKER, Settings, SettingsReader, SettingsRefused
from tests.rigs.processes import child_environment

# Packages that take long to import, and those of programs: settings and starters of programs must not need them.
SLOW = {"google", "grpc", "httptools", "numpy", "prometheus_client", "rich", "starlette", "tandem", "uvicorn", "zmq"}
AT_START = """
import sys

def report(event, words):
    if event == "subprocess.Popen":
        print(words[1][3], *sys.modules, flush=True)
        os._exit(0)

import os
sys.addaudithook(report)
from tandem_client.cli.__main__ import app
app(["serve", "--device=cpu", "--shared-pool=off", "--port=0", sys.argv[1]])
"""
AT_FORK = """
import os, signal
from tandem_client.services.settings import SettingsReader
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    SettingsReader("scheduler")
except KeyboardInterrupt:
    print("interrupted")
"""
PROBE = ["--health-listen=127.0.0.1:0"]


def read(**flags: Sequence[str]) -> dict[str, Settings]:
    with SettingsReader(*flags) as reader:
        return reader.read(flags)


def test_flags_come_before_variables_and_these_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max_waiting = 3\nfrontends = 3\ntokens = "t.toml"\n')
    monkeypatch.setenv("TANDEM_SCHEDULER_FRONTENDS", "2")
    monkeypatch.setenv("TANDEM_SCHEDULER_MAX_WAITING", "2")
    found = read(scheduler=["--config", str(file), "--max-waiting=1"], worker=["--device=cpu"])
    assert [found[SCHEDULER][name] for name in ("max_waiting", "frontends", "tokens")] == [1, 2, "t.toml"]
    assert (found[WORKER]["device"], found[WORKER]["shared_pool"]) == ("cpu", "auto")


@pytest.mark.parametrize(
    ("flags", "asks", "own"),
    [
        (["--tokens=t.toml"], True, PROBE),
        (["--tokens", "t.toml"], True, PROBE),
        (["--tls-cert=c.pem", "--tls-key=k.pem"], True, PROBE),
        (["--tokens=t.toml", "--health-listen=127.0.0.1:8090"], True, []),
        (["--max-waiting=3"], False, []),
    ],
)
def test_a_scheduler_that_wants_proofs_gets_an_address_for_health(flags: list[str], asks: bool, own: list[str]) -> None:
    found = read(scheduler=flags)[SCHEDULER]
    assert (asks_for_proofs(found), health_flags(found)) == (asks, own)


def test_a_gateway_is_read_by_its_own_rules() -> None:
    assert read(gateway=["--listen=127.0.0.1:0"])[GATEWAY]["tls_cert"] is None
    with pytest.raises(SettingsRefused, match=r"^gateway: --tls-cert and --tls-key are missing"):
        read(gateway=["--listen=0.0.0.0:0"])


def test_a_reader_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings._MODULES, WORKER, "tests.of_no_worker")
    with pytest.raises(SettingsRefused, match="the settings cannot be read: ModuleNotFoundError: No module named"):
        read(worker=[])
    with SettingsReader(SCHEDULER) as reader:
        os.kill(reader._pid, signal.SIGKILL)
        with pytest.raises(SettingsRefused, match="their reader was killed"):
            reader.read({SCHEDULER: []})


def test_an_interrupt_ends_a_wait_that_it_does_not_wake() -> None:
    """As one does that comes just before the call: here another thread takes it."""
    main = threading.get_ident()

    def interrupt() -> None:
        frame = None
        while frame is None or frame.f_code is not SettingsReader.read.__code__:
            frame = frame.f_back if frame is not None else sys._current_frames()[main]
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with SettingsReader(SCHEDULER) as reader:
        os.kill(reader._pid, signal.SIGSTOP)
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            reader.read({SCHEDULER: []})
        thread.join()


def test_an_interrupt_in_the_fork_is_not_lost() -> None:
    assert run(AT_FORK) == ["interrupted"]


def run(code: str, *arguments: str) -> list[str]:
    """The words that a fresh process prints."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=True).stdout.split()


@pytest.mark.parametrize("module", settings._MODULES.values())
def test_the_settings_of_a_program_are_read_without_its_libraries(module: str) -> None:
    """Each import before the answer makes the start of a service longer by its time."""
    found = set(run(f"import sys, {module}; print(*sys.modules)"))
    own = {name for name in found if name.startswith(("scheduler_svc.", "gpu_worker."))}
    assert module in found and own <= {module}
    assert not {name.partition(".")[0] for name in found} & SLOW


def test_serve_starts_its_first_program_before_it_imports_what_calls_it(tmp_path: Path) -> None:
    """The process that it starts first is a program: another Python would import pydantic once more for the check."""
    program, *found = run(AT_START, f"--runtime-dir={tmp_path / 'r'}")
    packages = {name.partition(".")[0] for name in found}
    assert program == "scheduler_svc" and {"asyncio", "tandem_client", "typer"} <= packages
    assert not packages & {*SLOW, "scheduler_svc", "gpu_worker"}
