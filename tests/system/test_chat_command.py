"""`tandem chat` on a terminal against a real service: its worker is killed in the middle of an answer.

The model answers with any bytes, control characters too.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_client import Client
from tandem_client.types import FinishReason
from tests.rigs.processes import Child, Rig, SchedulerProcess, child_environment
from tests.rigs.terminal import CTRL_D, ENTER, Terminal
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.conftest import Served
from tests.system.real_service import SHAPE

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")

TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
NEW_TOKENS = 120
SIZE = ("--num-pages", "256", "--max-rows", "16", "--max-length", "512")
PROMPT = r"\x1b\[\?2004h[^\n]*>"


@contextmanager
def chatting(rig: Rig, scheduler: SchedulerProcess, *flags: str) -> Iterator[Terminal]:
    own = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(rig.runtime_dir)}
    env = {**child_environment(), **own, "TANDEM_ADDRESS": scheduler.address}
    command = [sys.executable, "-m", "tandem_client.cli", "chat", "-t", "0", "-n", str(NEW_TOKENS), *flags]
    with Terminal(command, env) as terminal:
        terminal.expect(PROMPT)
        yield terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What a person says, and the conversation without a terminal and without a loss."""

    texts: tuple[str, str]
    messages: list[dict[str, object]]


def undisturbed(address: str) -> Talk:
    """A conversation; its first answer is as long as it may be."""
    with Client(address) as client:
        for number in range(20):
            talk = Talk(texts=(f"Hello {number}", "And?"), messages=[])
            ends: list[FinishReason] = []
            for text in talk.texts:
                talk.messages.append({"role": "user", "content": text})
                with client.generate(
                    chat=talk.messages, temperature=0, max_new_tokens=NEW_TOKENS, timeout=TIMEOUT_SECONDS
                ) as stream:
                    for _ in stream:
                        pass
                assert stream.finished is not None
                ends.append(stream.finished.reason)
                if ends[0] != FinishReason.LENGTH:
                    break
                talk.messages.append(stream.samples[0].message)
            else:
                return talk
    raise AssertionError("every answer ends early")


def saved(terminal: Terminal, folder: Path) -> list[dict[str, object]]:
    path = folder / "talk.json"
    terminal.type(f"/save {path}{ENTER}")
    terminal.expect("written to")
    return json.loads(path.read_text())["messages"]


def plain(shown: str) -> str:
    """The words without colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", shown).split())


def say_and_kill(terminal: Terminal, scheduler: SchedulerProcess, worker: Child, text: str) -> None:
    with Client(scheduler.address) as client:
        before = client.load().output_tokens
        terminal.type(text + ENTER)
        for _ in range(1000):
            if client.load().output_tokens >= before + NEW_TOKENS // 6:
                break
            time.sleep(0.01)
    worker.kill()
    terminal.expect("(worker|was) lost")


def check_the_end(terminal: Terminal, talk: Talk, folder: Path) -> None:
    shown = plain(terminal.expect(PROMPT))
    assert re.search(r"worker lost, resumed after \d+\.\d s", shown)
    assert f"{NEW_TOKENS} tokens, ended by length; first after" in shown and "1 worker change" in shown
    terminal.type(talk.texts[1] + ENTER)
    assert "error" not in terminal.expect(PROMPT)
    assert saved(terminal, folder) == talk.messages
    # None of the model's control characters; the sequences of a window's title and the clipboard begin with the first.
    assert not re.search("\x1b\\]|\x1bP|[\x00\x07\x9b]", terminal.seen)
    terminal.type(CTRL_D)
    assert terminal.expect_end() == 0


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    return "--chat-template", str(template), *SIZE, "--step-ms", "10"


def test_a_killed_worker_is_a_pause_on_the_terminal(rig: Rig, flags: tuple[str, ...], tmp_path: Path) -> None:
    scheduler, worker, _ = rig.serve(*flags)
    talk = undisturbed(scheduler.address)
    with chatting(rig, scheduler) as terminal:
        say_and_kill(terminal, scheduler, worker, talk.texts[0])
        rig.worker(*flags)
        check_the_end(terminal, talk, tmp_path)


@pytest.mark.long
def test_a_killed_front_end_is_a_pause_on_the_terminal(rig: Rig, flags: tuple[str, ...], tmp_path: Path) -> None:
    scheduler, _, _ = rig.serve(*flags)
    talk = undisturbed(scheduler.address)
    with chatting(rig, scheduler) as terminal:
        terminal.type(talk.texts[0] + ENTER)
        terminal.expect("\x1b\\[J")
        os.kill(scheduler.frontend_pid(), signal.SIGKILL)
        shown = plain(terminal.expect(PROMPT))
        assert "error" not in shown and f"{NEW_TOKENS} tokens, ended by length" in shown
        terminal.type(talk.texts[1] + ENTER)
        terminal.expect(PROMPT)
        assert saved(terminal, tmp_path) == talk.messages


def test_a_service_without_a_template_refuses_with_the_reason(served: Served) -> None:
    env = {**child_environment(), "TANDEM_ADDRESS": served.scheduler.address}
    with Terminal([sys.executable, "-m", "tandem_client.cli", "chat"], env) as terminal:
        terminal.expect("error: the service refuses chats: .*template.*tandem generate")
        assert terminal.expect_end() == 2


@pytest.mark.long
def test_the_bundled_model_talks_over_the_kill_of_its_worker(rig: Rig, tmp_path: Path) -> None:
    flags = [*SHAPE.split(), "--num-pages", "128"]
    first = rig.real_worker(*flags)
    scheduler = rig.scheduler()
    with Client(scheduler.address) as client:
        client.wait_ready(TIMEOUT_SECONDS)
    talk = undisturbed(scheduler.address)
    with chatting(rig, scheduler) as terminal:
        say_and_kill(terminal, scheduler, first, talk.texts[0])
        rig.real_worker(*flags)
        check_the_end(terminal, talk, tmp_path)
