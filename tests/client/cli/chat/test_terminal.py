"""`tandem chat` on a real terminal, against a fake service."""

import json
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tandem.v1 import chat_pb2, control_pb2
from tandem.v1 import inference_pb2 as pb

from tests.client import fake_service
from tests.client.fake_service import Ending, FakeService, sending
from tests.rigs import processes
from tests.rigs.processes import child_environment
from tests.rigs.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Terminal
from tests.rigs.waiting import TIMEOUT_SECONDS

CHAT = ("tandem_client.cli", "chat")
Chat = Callable[..., Terminal]
Messages = Iterator[pb.GenerateResponse]
# The prompt, which prompt_toolkit prints with sequences between its characters.
PROMPT = r"\x1b\[\?2004h[^\n]*>"


def environment(service: FakeService, home: Path, **others: str) -> dict[str, str]:
    kept = {name: value for name, value in child_environment().items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    own = {
        "TANDEM_ADDRESS": service.address,
        "XDG_STATE_HOME": str(home),
        "TERM": "xterm-256color",
        # The test answers no questions about the cursor's position.
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    return {**kept, **own, **others}


@pytest.fixture
def chat(service: FakeService, tmp_path: Path) -> Iterator[Chat]:
    opened: list[Terminal] = []

    def start(*arguments: str, then: str = PROMPT, **others: str) -> Terminal:
        opened.append(Terminal([sys.executable, "-m", *CHAT, *arguments], environment(service, tmp_path, **others)))
        opened[-1].expect(then)
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.__exit__()


def part(**fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(**fields))


ENDS = (fake_service.finished(3, pb.FINISH_REASON_EOS), fake_service.summary(3))


def saying(*texts: str) -> Callable[[pb.GenerateRequest, Ending], Messages]:
    return sending(*(part(text=text) for text in texts), *ENDS)


def sent(service: FakeService) -> list[list[tuple[str, str]]]:
    """The roles and the texts of the messages of each request."""
    requests = [request for request in service.requests if isinstance(request, pb.GenerateRequest)]
    return [[(each.role, "\n".join(each.content)) for each in request.chat.messages] for request in requests]


def say(terminal: Terminal, text: str, then: str = PROMPT) -> str:
    """Types a line at the prompt, and reads until the next one."""
    terminal.type(text + ENTER)
    return terminal.expect(then)


def test_a_conversation(service: FakeService, chat: Chat, tmp_path: Path) -> None:
    service.behaviour = saying("It is **bo", "ld**.")
    terminal = chat("--system", "Be brief.", "-t", "0")
    assert "fake, 1,024 tokens; /help lists commands" in terminal.seen
    shown = say(terminal, "What?")
    assert "It is \x1b[1mbold\x1b[0m." in shown
    # Where the line is broken depends on the digits of its figures.
    words = " ".join(re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown).split())
    figures = r"3 tokens, ended by eos; first after [\d.]+ s(, then [\d.]+ tokens/s)?; 2 of 3 prompt tokens cached"
    assert re.search(f"{figures}; 1 worker change", words)
    # The arrow brings back what was typed.
    say(terminal, UP)
    say(terminal, "/regen")
    assert "4 messages" in say(terminal, "/tokens")
    say(terminal, "/set temperature 0.5")
    assert "temperature is 'hot'; it must be a number" in say(terminal, "/set temperature hot")
    say(terminal, "/clear")
    say(terminal, "New")
    terminal.type(CTRL_D)
    assert terminal.expect_end() == 0
    first = [("system", "Be brief."), ("user", "What?")]
    second = [*first, ("assistant", "It is **bold**."), ("user", "What?")]
    assert sent(service) == [first, second, second, [first[0], ("user", "New")]]
    requests = [request for request in service.requests if isinstance(request, pb.GenerateRequest)]
    assert [request.sampling.temperature for request in requests] == [0.0, 0.0, 0.0, 0.5]
    # A lost connection does not lose the answer.
    assert all(request.resume.linger_seconds for request in requests)
    history = tmp_path / "tandem" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "+What?" in history.read_text()


def test_ctrl_c_ends_the_answer_and_not_the_program(service: FakeService, chat: Chat) -> None:
    ended = threading.Event()

    def endless(request: pb.GenerateRequest, ending: Ending) -> Messages:
        if len(service.endings) > 1:
            yield from saying("Later.")(request, ending)
            return
        yield fake_service.accepted(request)
        yield part(text="Half an ans")
        ending.wait(10 * TIMEOUT_SECONDS)
        ended.set()

    service.behaviour = endless
    terminal = chat()
    say(terminal, "Go", "Half an ans")
    terminal.type(CTRL_C)
    assert "interrupted" in terminal.expect(PROMPT)
    assert ended.wait(TIMEOUT_SECONDS)
    # At the prompt it empties the line.
    terminal.type("not this")
    terminal.expect("not this")
    terminal.type(CTRL_C)
    terminal.expect(PROMPT)
    say(terminal, "And?")
    terminal.type(CTRL_D)
    assert terminal.expect_end() == 0
    assert service.aborted == [service.requests[0].request_id]
    # What came of the answer is part of the conversation.
    assert sent(service)[1] == [("user", "Go"), ("assistant", "Half an ans"), ("user", "And?")]


def test_what_is_typed_during_an_answer_waits_for_the_prompt(service: FakeService, chat: Chat) -> None:
    goes_on = threading.Event()
    service.behaviour = sending(part(text="Half."), lambda _: goes_on.wait(TIMEOUT_SECONDS), *ENDS)
    terminal = chat()
    say(terminal, "Go", "Half")
    terminal.type(f"typed ahead{ENTER}{CTRL_D}")
    goes_on.set()
    assert "typed ahead" not in terminal.expect("worker change")
    assert terminal.expect_end() == 0
    assert [turns[-1][1] for turns in sent(service)] == ["Go", "typed ahead"]


def test_an_answer_without_a_part_is_taken_back(service: FakeService, chat: Chat) -> None:
    service.behaviour = sending(fake_service.stays)
    terminal = chat()
    say(terminal, "Go", r"waiting \(\d s\)")
    terminal.type(CTRL_C)
    assert "interrupted; the message was taken back" in terminal.expect(PROMPT)
    service.behaviour = saying("Yes.")
    say(terminal, "Again")
    assert sent(service)[1] == [("user", "Again")]


def test_a_lost_worker_is_told(service: FakeService, chat: Chat) -> None:
    goes_on = threading.Event()

    def lose(_: Ending) -> None:
        service.load = control_pb2.GetLoadResponse(
            worker_lost_seconds=0.1, worker_lost_reason="killed by signal 9", not_serving="no worker is connected"
        )
        goes_on.wait(TIMEOUT_SECONDS)

    service.behaviour = sending(part(text="Before, "), lose, part(text="after."), *ENDS)
    terminal = chat()
    say(terminal, "Go", r"worker lost: killed by signal 9; the answer goes on when another worker")
    goes_on.set()
    shown = terminal.expect(PROMPT)
    assert re.search(r"worker lost, resumed after \d\.\d s", shown)
    assert "Before, after." in shown and "error" not in terminal.seen


def test_a_lost_front_end_is_told_and_the_answer_goes_on(service: FakeService, chat: Chat) -> None:
    goes_on = threading.Event()

    def cut(ending: Ending) -> None:
        service.load = grpc.StatusCode.UNAVAILABLE
        fake_service.breaks(ending)

    def rest(request: pb.ResumeRequest, ending: Ending) -> Messages:
        goes_on.wait(TIMEOUT_SECONDS)
        yield from sending(part(text="after."), *ENDS)(request, ending)

    service.behaviour, service.resumption = sending(part(text="Before, "), cut), rest
    terminal = chat()
    say(terminal, "Go", r"connection lost \(.*; trying again")
    goes_on.set()
    shown = terminal.expect(PROMPT)
    assert re.search(r"connection lost, resumed after \d\.\d s", shown) and "Before, after." in shown
    assert service.resumed[0].offsets[0].text_chars == len("Before, ")


def test_an_error_ends_the_answer_and_not_the_program(service: FakeService, chat: Chat) -> None:
    service.behaviour = fake_service.refusing_field("chat", "chat has 2,000 tokens; the limit is 1,023")
    terminal = chat()
    shown = " ".join(say(terminal, "Go").split())
    assert "error: chat has 2,000 tokens; the limit is 1,023" in shown and "the message was taken back" in shown
    assert "/hepl is not a command" in say(terminal, "/hepl")
    assert "is not a setting" in say(terminal, "/set colour red")
    assert "No such file" in say(terminal, "/load /nowhere/talk.json")
    service.behaviour = saying("Yes.")
    assert "Yes." in say(terminal, "Again")
    assert sent(service)[1] == [("user", "Again")]


def test_messages_of_several_lines(service: FakeService, chat: Chat) -> None:
    service.behaviour = saying("Yes.")
    terminal = chat()
    say(terminal, f"one{ALT_ENTER}two")
    # Enter sends only after the closing quotes.
    terminal.type(f'"""three{ENTER}/four{ENTER}"""{ENTER}')
    terminal.expect(PROMPT)
    # A paste is one message, also with line breaks.
    say(terminal, "\x1b[200~five\rsix\x1b[201~")
    assert [turns[-1][1] for turns in sent(service)] == ["one\ntwo", "three\n/four", "five\nsix"]


def test_a_conversation_is_saved_and_loaded(service: FakeService, chat: Chat, tmp_path: Path) -> None:
    service.behaviour = saying("Yes.")
    saved = tmp_path / "talk.json"
    terminal = chat("--system", "s")
    say(terminal, "Go")
    assert "2 messages written" in say(terminal, f"/save {saved}")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    other = chat("-f", str(saved))
    say(other, "On")
    say(other, f"/load {saved}")
    assert "2 messages written" in say(other, f"/save {saved}")
    assert sent(service)[1] == [("system", "s"), ("user", "Go"), ("assistant", "Yes."), ("user", "On")]
    # A file that this conversation does not know is not overwritten.
    strange = tmp_path / "notes.txt"
    strange.write_text("mine")
    assert "exists, and this conversation was not loaded" in say(terminal, f"/save {strange}")
    assert strange.read_text() == "mine"


def test_results_of_tools_are_typed(service: FakeService, chat: Chat) -> None:
    call = chat_pb2.ToolCallDelta(id="abcdefghi", name="wea\x1b[2Jther", arguments='{"city": "Rom"}')

    def calling(request: pb.GenerateRequest, ending: Ending) -> Messages:
        first = sending(part(reasoning="Which city?"), part(tool_calls=[call]), *ENDS)
        yield from (saying("Sunny.") if len(service.endings) > 1 else first)(request, ending)

    service.behaviour = calling
    terminal = chat("--tools", '[{"type": "function", "function": {"name": "weather"}}]')
    say(terminal, "Weather?", 'calls wea␛.2Jther {"city": "Rom"}')
    terminal.expect("result of wea␛.2Jther>")
    assert "Sunny." in say(terminal, "sun")
    last = next(request for request in reversed(service.requests) if isinstance(request, pb.GenerateRequest))
    assert [message.role for message in last.chat.messages] == ["user", "assistant", "tool"]
    assert last.chat.messages[2].tool_call_id == "abcdefghi" and len(last.chat.tools_json) == 1
    assert "\x1b[2J" not in terminal.seen


def test_a_model_cannot_write_to_the_terminal(service: FakeService, chat: Chat) -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b1A \rx &#27;[31m\n"
    service.behaviour = saying(*hostile, "end")
    service.model = "fake\x1b[2J"
    terminal = chat()
    say(terminal, "Go")
    assert not re.search("\x1b\\]|\x1b\\[2J|\x9b|\x07", terminal.seen)


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_terminals_without_colours(service: FakeService, chat: Chat, name: str, value: str) -> None:
    service.behaviour = saying("# Title\n\n`code`\n", "\n```python\nprint(1)\n```\n")
    terminal = chat(**{name: value}, then="leaves")
    shown = say(terminal, "Go", "worker change")
    assert not re.search(r"\x1b\[[\d;]*(3[0-7]|9[0-7]|38;)[\d;]*m", shown)
    if name == "TERM":
        # Text as it comes.
        assert "# Title" in shown and "\x1b[1A" not in shown
    terminal.type(CTRL_D)
    assert terminal.expect_end() == 0


def test_a_narrower_window_goes_on(service: FakeService, chat: Chat) -> None:
    resized = threading.Event()
    wide = part(text="word " * 30)
    service.behaviour = sending(wide, lambda _: resized.wait(TIMEOUT_SECONDS), part(text="last word"), *ENDS)
    terminal = chat()
    say(terminal, "Go", "word \r?\n|word\r?\n")
    terminal.resize(24, 30)
    resized.set()
    shown = terminal.expect(PROMPT)
    answer = shown[shown.rindex("\x1b[J", 0, shown.index("tokens")) :]
    assert "last word" in " ".join(answer.split()) and all(len(line) <= 34 for line in answer.split("\r\n")[:5])


def run(service: FakeService, home: Path, *arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*CHAT, *arguments, text=stdin, env=environment(service, home))


def test_piped_input_is_one_turn_without_decoration(service: FakeService, tmp_path: Path) -> None:
    service.behaviour = saying("# It\n", "is.")
    result = run(service, tmp_path, "Review:", "--system", "s", stdin="a\nb\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "# It\nis.\n", "")
    assert sent(service) == [[("system", "s"), ("user", "Review:\n\na\nb")]]
    lines = run(service, tmp_path, "--json", stdin="hi").stdout.splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["accepted", "delta", "delta", "finished", "summary"]
    assert not (tmp_path / "tandem").exists()


def test_an_empty_pipe_is_refused(service: FakeService, tmp_path: Path) -> None:
    result = run(service, tmp_path, stdin="\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: the message is empty; at least 1 character is needed\n"


def test_a_service_without_chats_says_why(service: FakeService, chat: Chat, tmp_path: Path) -> None:
    service.chat_refusal = "the model has no chat template."
    said = "error: the service refuses chats: the model has no chat template; tandem generate continues a text"
    result = run(service, tmp_path, stdin="hi")
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.startswith(said)
    terminal = chat(then="the model has no chat template")
    assert terminal.expect_end() == 2


def test_a_service_that_does_not_answer(service: FakeService, chat: Chat) -> None:
    terminal = chat(
        "--address",
        "127.0.0.1:1",
        then=r"error: nothing answers at 127.0.0.1:1: Connection refused \(start one with tandem serve",
    )
    assert terminal.expect_end() == 3
