"""`tandem serve` with real streams: the first signal drains it, the second one ends it and all its processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tandem_client import Client
from tandem_client.errors import TandemError, Unavailable
from tests.rigs.processes import REPOSITORY, child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS

# In place of the real worker, which takes seconds to start: a step of 20 ms, for streams of 80 s.
WORKER = """\
import runpy, sys
[folder] = [word.partition("=")[2] for word in sys.argv if word.startswith("--runtime-dir=")]
shape = ["--max-length", "4096", "--page-size", "16", "--num-pages", "1100"]
sys.argv = ["worker", "--runtime-dir", folder, "--step-ms", "20", *shape]
runpy.run_module("tests.rigs.checking_worker", run_name="__main__")
"""
OUTPUT_TOKENS = 4000
ENDED = "(the output has ended)"


class Stream:
    """A stream that a thread reads."""

    def __init__(self, client: Client, number: int) -> None:
        self.error: TandemError | None = None
        self._changed = threading.Condition()
        self._num_tokens = 0
        options = {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        self._stream = client.generate([number, 7], **options)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def wait_more(self, count: int) -> None:
        """Waits until so many more tokens have come."""
        with self._changed:
            wanted = self._num_tokens + count
            assert self._changed.wait_for(lambda: self._num_tokens >= wanted or self.error, TIMEOUT_SECONDS)
            assert self.error is None

    def _read(self) -> None:
        try:
            for delta in self._stream:
                with self._changed:
                    self._num_tokens += len(delta.token_ids)
                    self._changed.notify_all()
        except TandemError as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_all_streams_and_processes(tmp_path: Path, second: signal.Signals) -> None:
    package = tmp_path / "gpu_worker"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(WORKER)
    (package / "settings.py").symlink_to(REPOSITORY / "gpu_worker" / "settings.py")
    (tmp_path / "run").mkdir(mode=0o700)
    flags = ["--listen", "127.0.0.1:0", "--shared-pool", "off", "--runtime-dir", str(tmp_path / "run")]
    # The folder comes before the repository, which has a real worker.
    environment = child_environment()
    # The first signal alone would let the streams run for an hour.
    environment["TANDEM_SCHEDULER_GRACE_SECONDS"] = "3600"
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    serve = subprocess.Popen(
        [sys.executable, "-m", "tandem_client.cli", "serve", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    lines: list[str] = []
    changed = threading.Condition()

    def read() -> None:
        for line in serve.stdout or ():
            with changed:
                lines.append(line.rstrip())
                changed.notify_all()
        with changed:
            lines.append(ENDED)
            changed.notify_all()

    def wait_line(text: str) -> str:
        with changed:
            changed.wait_for(lambda: any(text in line or line == ENDED for line in lines), TIMEOUT_SECONDS)
            found = [line for line in lines if text in line]
            assert found, "\n".join(lines)
            return found[0]

    reader = threading.Thread(target=read)
    reader.start()
    left: list[psutil.Process] = []
    try:
        wait_line("ready: tandem generate")
        left = psutil.Process(serve.pid).children(recursive=True)
        assert len(left) >= 3  # scheduler, front end, worker
        with Client(wait_line("frontend listening on").split()[-1], max_retries=0) as client:
            streams = [Stream(client, number) for number in range(4)]
            for stream in streams:
                stream.wait_more(5)
            serve.send_signal(signal.SIGTERM)
            wait_line("stopping: new requests are refused")
            for stream in streams:
                stream.wait_more(20)
            with pytest.raises(Unavailable):
                list(client.generate([1], max_new_tokens=1))
            serve.send_signal(second)
            assert serve.wait(TIMEOUT_SECONDS) == 0
            _, alive = psutil.wait_procs(left, timeout=TIMEOUT_SECONDS)
            assert alive == []
            for stream in streams:
                stream.thread.join(TIMEOUT_SECONDS)
                assert isinstance(stream.error, Unavailable), stream.error
        wait_line("stopping now: all requests end")
    finally:
        for process in (psutil.Process(serve.pid) if serve.poll() is None else None, *left):
            if process is not None and process.is_running():
                process.kill()
        serve.wait()
        reader.join()
        if serve.stdout is not None:
            serve.stdout.close()


def test_no_program_goes_on_without_the_one_that_started_it(tmp_path: Path) -> None:
    """A parent that was killed while its child started: the system then names another process as the parent."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "run").mkdir(mode=0o700)
    folder = f"--runtime-dir={tmp_path / 'run'}"
    commands = [
        ["scheduler_svc", "--listen=127.0.0.1:0", folder, "--exit-with-parent"],
        ["gpu_worker", folder, "--device=cpu", "--exit-with-parent"],
        ["gpu_worker.holder", folder, "--exit-with-parent"],
        ["tandem_client.gateway", "--listen=127.0.0.1:0", "--exit-with-parent"],
    ]
    environment = {**child_environment(), "_TANDEM_PARENT": str(gone.pid)}
    started = [
        subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, cwd=tmp_path, env=environment)
        for command in commands
    ]  # fmt: skip
    for process in started:
        assert process.communicate(timeout=60) == ("", None)
        assert process.returncode == 1
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("turns", range(3))
def test_a_kill_of_serve_at_its_start_leaves_no_process(tmp_path: Path, turns: int) -> None:
    package = tmp_path / "gpu_worker"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(WORKER)
    (package / "settings.py").symlink_to(REPOSITORY / "gpu_worker" / "settings.py")
    (tmp_path / "run").mkdir(mode=0o700)
    flags = ["--listen", "127.0.0.1:0", "--runtime-dir", str(tmp_path / "run"), "--shared-pool", "off"]
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    serve = psutil.Popen(
        [sys.executable, "-m", "tandem_client.cli", "serve", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path, env=environment,
    )  # fmt: skip
    # Later in each turn.
    while len(found := serve.children(recursive=True)) < 1 + turns:
        assert serve.poll() is None
    serve.kill()
    serve.wait()
    _, left = psutil.wait_procs(found, timeout=60)
    for process in left:
        process.kill()
    assert not left, [process.cmdline() for process in left]
