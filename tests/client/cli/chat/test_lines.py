"""Lines that begin with a slash, settings, and the completion of both."""

from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from tandem_client.cli.chat import loop as reader
from tandem_client.cli.chat.loop import COMMANDS, SETTINGS, help_lines, is_complete, parse, parse_setting
from tandem_client.wire.request import generate_request


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("hello", ("", "hello")),
        ("  /no command", ("", "/no command")),
        ('"""\n/also\n  none\n"""', ("", "/also\n  none")),
        ('"""one line"""', ("", "one line")),
        ("a\nb", ("", "a\nb")),
        ("", ("", "")),
        ("/help", ("/help", "")),
        ("/?", ("/help", "")),
        ("/bye ", ("/quit", "")),
        ("/system Be brief. ", ("/system", "Be brief.")),
        ("/system", ("/system", "")),
        ("/set temperature 0.5", ("/set", "temperature 0.5")),
        ("/save a b", ("/save", "a b")),
    ],
)
def test_a_line_is_a_command_or_a_message(text: str, read: tuple[str, str]) -> None:
    assert parse(text) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/hepl", "/hepl is not a command; did you mean /help?"),
        ("/xyzzy", "/xyzzy is not a command; /help lists the commands"),
        ("/clear all", "/clear takes no argument"),
        ("/save", "/save needs FILE"),
    ],
)
def test_a_wrong_command_says_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "complete"), [("a", True), ('"""a', False), ('"""', False), ('"""a\n"""', True), ('""""""', True)]
)
def test_enter_sends_unless_quotes_are_open(text: str, complete: bool) -> None:
    assert is_complete(text) == complete


def test_every_setting_is_an_option_of_generate() -> None:
    values = {name: parse_setting(name, '{"a": 1}' if name == "template_args" else "1") for name in SETTINGS}
    request = generate_request(None, chat=[{"role": "user", "content": "a"}], **values)
    assert request.sampling.top_k == 1 and request.chat.template_args_json == '{"a": 1}'
    assert parse_setting("temperature", "") is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temprature", "1", "'temprature' is not a setting; there are temperature, "),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("top_k", "1.5", "top_k is '1.5'; it must be a whole number"),
        ("template_args", "[1]", r"template_args is '\[1\]'; it must be a JSON object"),
    ],
)
def test_a_wrong_setting_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_setting(name, text)


def completions(text: str) -> list[str]:
    found = reader._Commands().get_completions(Document(text), CompleteEvent())
    return [text[: len(text) + each.start_position] + each.text for each in found]


def test_commands_settings_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    assert completions("/") == list(COMMANDS)
    assert completions("/s") == ["/system", "/set", "/save"]
    assert completions("/set top") == ["/set top_p", "/set top_k"]
    assert completions(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk.json"]
    assert completions("hello /s") == completions("/set top_p ") == completions("/clear ") == []


def test_the_help_has_every_command() -> None:
    assert {name.split()[0] for name, _ in help_lines()} >= set(COMMANDS)
