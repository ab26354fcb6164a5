"""`tandem chat` on a terminal against a real service: its worker is killed in the middle of an answer.

The model answers with any bytes, control characters too.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem_client import Client
from tests.rigs.processes import Child, Rig, SchedulerProcess, child_environment
from tests.rigs.terminal import CTRL_D, ENTER, Terminal
from tests.system.real_service import BUNDLED, SHAPE

TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
NEW_TOKENS = 120
SIZE = ("--num-pages", "256", "--max-rows", "16", "--max-length", "512")
PROMPT = r"\x1b\[\?2004h[^\n]*>"
FIRST = [{"role": "user", "content": "Hello"}]


@contextmanager
def chatting(rig: Rig, scheduler: SchedulerProcess, *flags: str) -> Iterator[Terminal]:
    own = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(rig.runtime_dir)}
    env = {**child_environment(), **own, "TANDEM_ADDRESS": scheduler.address}
    command = [sys.executable, "-m", "tandem_client.cli", "chat", "-t", "0", "-n", str(NEW_TOKENS), *flags]
    with Terminal(command, env) as terminal:
        terminal.expect(PROMPT)
        yield terminal


def wait_tokens(address: str, number: int) -> None:
    """Waits until the service has computed so many output tokens."""
    with Client(address) as client:
        for _ in range(1000):
            if client.load().output_tokens >= number:
                return
            time.sleep(0.02)
    raise AssertionError(f"fewer than {number} tokens")


def undisturbed(address: str, turns: Sequence[str]) -> list[dict[str, object]]:
    """The conversation of these messages without a terminal and without a loss."""
    messages: list[dict[str, object]] = []
    with Client(address) as client:
        for text in turns:
            messages.append({"role": "user", "content": text})
            with client.generate(chat=messages, temperature=0, max_new_tokens=NEW_TOKENS, timeout=60) as stream:
                for _ in stream:
                    pass
            messages.append(stream.samples[0].message)
    return messages


def saved(terminal: Terminal, folder: Path) -> list[dict[str, object]]:
    path = folder / "talk.json"
    terminal.type(f"/save {path}{ENTER}")
    terminal.expect("written to")
    return json.loads(path.read_text())["messages"]


def say_and_kill(terminal: Terminal, scheduler: SchedulerProcess, worker: Child) -> None:
    terminal.type("Hello" + ENTER)
    wait_tokens(scheduler.address, NEW_TOKENS // 6)
    worker.kill()
    terminal.expect(r"worker lost")


def check_the_end(terminal: Terminal) -> None:
    # What is written at the end of the lost worker's answer.
    shown = terminal.expect(PROMPT)
    assert re.search(r"worker lost, resumed after \d+\.\d s", shown)
    assert re.search(rf"{NEW_TOKENS} tokens, ended by length; first after", shown) and "1 worker change" in shown
    terminal.type("And?" + ENTER)
    assert "error" not in terminal.expect(PROMPT)
    # None of the model's control characters; the sequences of a window's title and the clipboard begin with the first.
    assert not re.search("\x1b\\]|\x1bP|[\x00\x07\x9b]", terminal.seen)


def test_a_killed_worker_is_a_pause_on_the_terminal(rig: Rig, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), *SIZE, "--step-ms", "10")
    scheduler, worker, _ = rig.serve(*flags)
    with chatting(rig, scheduler) as terminal:
        say_and_kill(terminal, scheduler, worker)
        rig.worker(*flags)
        check_the_end(terminal)
        assert saved(terminal, tmp_path) == undisturbed(scheduler.address, ["Hello", "And?"])
        terminal.type(CTRL_D)
        assert terminal.expect_end() == 0


def test_a_service_without_a_template_refuses_with_the_reason(rig: Rig) -> None:
    scheduler, _, _ = rig.serve(*SIZE)
    env = {**child_environment(), "TANDEM_ADDRESS": scheduler.address}
    with Terminal([sys.executable, "-m", "tandem_client.cli", "chat"], env) as terminal:
        terminal.expect("error: the service refuses chats: .*template.*tandem generate")
        assert terminal.expect_end() == 2


@pytest.mark.long
def test_the_bundled_model_talks_over_the_kill_of_its_worker(rig: Rig, tmp_path: Path) -> None:
    flags = [*SHAPE.split(), "--model", str(BUNDLED / "model"), "--num-pages", "128", "--exit-with-parent"]

    def worker() -> Child:
        child = Child(
            "gpu_worker",
            ["gpu_worker", "--runtime-dir", str(rig.runtime_dir), *flags],
            environment={"OMP_NUM_THREADS": "1"},
        )
        rig.children.append(child)
        return child

    first = worker()
    scheduler = rig.scheduler()
    with Client(scheduler.address) as client:
        client.wait_ready(timeout=110)
    with chatting(rig, scheduler) as terminal:
        say_and_kill(terminal, scheduler, first)
        worker()
        check_the_end(terminal)
        assert saved(terminal, tmp_path) == undisturbed(scheduler.address, ["Hello", "And?"])
