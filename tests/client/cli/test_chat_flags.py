"""The flags of chats and constraints of `tandem generate` and `tandem tokenize`."""

import json
from pathlib import Path

import pytest
from tandem.v1 import chat_pb2, constraint_pb2, inference_pb2

from tandem_client.cli.plain import plain
from tests.client import fake_service
from tests.client.fake_service import FakeService, refusing_field, sending

TOOLS = '[{"type": "function", "function": {"name": "weather"}}]'
USER = chat_pb2.ChatMessage(role="user", content=["hi"])


def test_a_chat_sends_messages(tandem, service: FakeService, tmp_path: Path) -> None:
    # As some editors write it, with a byte order mark.
    (tmp_path / "tools.json").write_text(TOOLS, "utf-8-sig")
    assert tandem("generate", "hi", "--chat").stdout == "Réturn\n"
    tandem(
        "generate", "-", "--system", "Be brief.", "--tools", str(tmp_path / "tools.json"), "--tool-choice", "weather",
        "--template-args", '{"a": 1}', "--no-parsed", stdin="hi\n",
    )  # fmt: skip
    tandem("generate", "hi", "--chat", "--tools", TOOLS, "--tool-choice", "required")
    short, full, required = (request.chat for request in service.requests)
    assert short == chat_pb2.Chat(messages=[USER])
    assert list(full.messages) == [chat_pb2.ChatMessage(role="system", content=["Be brief."]), USER]
    assert [json.loads(tool) for tool in full.tools_json] == json.loads(TOOLS)
    assert (full.tool_choice.name, full.template_args_json, full.unparsed) == ("weather", '{"a": 1}', True)
    assert required.tool_choice.mode == chat_pb2.TOOL_CHOICE_MODE_REQUIRED


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        (["--json-schema", '{"b": 1, "a": 2}'], constraint_pb2.Constraint(json_schema='{"b": 1, "a": 2}')),
        (["--json-schema", "SCHEMA"], constraint_pb2.Constraint(json_schema='{"type": "null"}')),
        (["--json-schema", "true"], constraint_pb2.Constraint(json_schema="true")),
        (["--json-object"], constraint_pb2.Constraint(json_object=constraint_pb2.JsonObject())),
        (["--regex", "a+"], constraint_pb2.Constraint(regex="a+")),
        (["--choice", "a", "--choice", "b"], constraint_pb2.Constraint(choices={"choices": ["a", "b"]})),
        (["--lark", "GRAMMAR"], constraint_pb2.Constraint(lark='start: "a"\n')),
    ],
)
def test_each_constraint_has_a_flag(
    tandem, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], sent: object
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("SCHEMA").write_text('{"type":\n"null"}')
    Path("GRAMMAR").write_text('start: "a"\n')
    assert tandem("generate", "hi", *flags).exit_code == 0
    assert service.requests[0].constraint == sent


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--json-schema", "{"], "--json-schema is not JSON: "),
        (["--json-schema", "[1]"], "--json-schema is '[1]'; it must be a JSON schema"),
        (["--tools", "{}"], "--tools is '{}'; it must be a JSON list"),
        (["--tools", TOOLS], "--tools is for a chat; the request has a prompt"),
        (["--chat", "--template-args", "[]"], "--template-args is '[]'; it must be a JSON object"),
        (["--chat", "--template-args", "[" * 100_000], "--template-args is nested too deeply"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice are given; an output has one constraint"),
        (["--token-ids", "--chat"], "--chat and --token-ids exclude each other"),
    ],
)
def test_a_wrong_value_is_one_line(tandem, service: FakeService, flags: list[str], line: str) -> None:
    result = tandem("generate", "5" if "--token-ids" in flags else "hi", *flags)
    assert (result.exit_code, service.requests) == (2, [])
    assert result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1


def test_a_missing_file_is_one_line(tandem, tmp_path: Path) -> None:
    result = tandem("generate", "hi", "--lark", str(tmp_path / "none"))
    assert (result.exit_code, result.stderr) == (2, f"error: --lark: {tmp_path}/none: No such file or directory\n")


@pytest.mark.parametrize(
    ("field", "path", "flag", "value", "said"),
    [
        ("constraint.json_schema", "constraint.json_schema", "--json-schema", "{}", "it has no uniqueItems (at /a)"),
        # Of the whole constraint.
        ("constraint", "constraint.regex", "--regex", "a", "nested repetitions make 1000000; the limit is 10000"),
    ],
)
def test_a_refused_constraint_names_the_flag(
    tandem, service: FakeService, field: str, path: str, flag: str, value: str, said: str
) -> None:
    service.behaviour = refusing_field(field, f"{path}: {said}")
    assert tandem("generate", "hi", flag, value).stderr == f"error: {flag}: {said}\n"


def test_tool_calls_are_lines_of_json_after_the_text(tandem, service: FakeService) -> None:
    call = chat_pb2.ToolCallDelta(id="abcdefghi", name="weather", arguments='{"a": 1}')
    deltas = [
        inference_pb2.GenerateResponse(delta=inference_pb2.Delta(**delta))
        for delta in ({"reasoning": "Hm."}, {"text": "Look:"}, {"tool_calls": [call]})
    ]
    service.behaviour = sending(*deltas, fake_service.finished(0), fake_service.summary(0))
    text, line = tandem("generate", "hi", "--chat").stdout.splitlines()
    # Reasoning is not the answer; --json has it.
    assert text == "Look:"
    function = {"name": "weather", "arguments": '{"a": 1}'}
    assert json.loads(line) == {"id": "abcdefghi", "type": "function", "function": function}


def test_tokenize_prints_the_tokens_of_a_rendered_message(tandem, service: FakeService) -> None:
    assert tandem("tokenize", "hi", "--chat").stdout == " ".join(map(str, b"user")) + "\n"
    made = json.loads(tandem("tokenize", "hi", "--system", "s", "--json").stdout)
    assert made == {"token_ids": list(b"system|user"), "text": "system|user"}


def test_no_control_character_stays_in_plain_text() -> None:
    every = "".join(map(chr, range(0x3000)))
    shown = plain(every)
    assert not [char for char in shown if (ord(char) < 32 and char not in "\t\n") or 127 <= ord(char) < 160]
    assert not set("\u202e\u2066\u2028") & set(shown)
    assert plain("\x1b]0;own\x07 ok\r\n") == "␛]0;own␇ ok\n"
    assert plain("Zoë 👩‍🚀 \t日本") == "Zoë 👩‍🚀 \t日本"
