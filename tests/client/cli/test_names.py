"""Each error that the service can give about a field names what the help of the command shows, and no field."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from tandem.v1 import control_pb2, inference_pb2
from typer.main import get_command

from tandem_client import errors
from tandem_client.cli.__main__ import app
from tandem_client.cli.flags import THE_PROMPT
from tandem_client.cli.names import _WITHOUT_FLAG, keyword_in_flags
from tandem_client.cli.reporting import describe
from tandem_client.wire.request import FIELD_KEYWORDS

ROOT = Path(__file__).resolve().parents[3]
# The commands that send a request of each kind.
COMMANDS = {
    inference_pb2.GenerateRequest: "generate",
    inference_pb2.TokenizeRequest: "tokenize",
    inference_pb2.DetokenizeRequest: "detokenize",
    inference_pb2.RenderChatRequest: "tokenize",
    control_pb2.AbortRequest: "abort",
    control_pb2.ClearQuarantineRequest: "quarantine",
    control_pb2.DrainRequest: "drain",
    control_pb2.UpdateWeightsRequest: "update-weights",
}
# Fields that no command sets: of other programs, and of the library.
UNSET = {"separately", *(path for path, keyword in FIELD_KEYWORDS.items() if keyword in _WITHOUT_FLAG)}


def paths(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        path = prefix + field.name
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry or not kind.fields or field.is_repeated:
            yield path
            if field.is_repeated:
                yield f"{path}[3]"
        else:
            yield from paths(kind, f"{path}.")


CASES = [
    (command, path)
    for request, command in COMMANDS.items()
    for path in paths(request.DESCRIPTOR)
    if path.partition("[")[0] not in UNSET
    # `tandem tokenize --chat` sends messages alone.
    and not (command == "tokenize" and path.startswith("chat.") and not path.startswith("chat.messages"))
]


@pytest.mark.parametrize(("command", "path"), CASES)
def test_a_refused_field_is_named_as_the_help_of_its_command_does(command: str, path: str) -> None:
    said = f"{path} is 3; the limit is 2"
    violation = errors.FieldViolation(field=path, description=said)
    error = errors.InvalidArgument(said, code=grpc.StatusCode.INVALID_ARGUMENT, violations=(violation,))
    line = describe(error, of_generate=command == "generate")
    found = re.match(r"(token 3 of )?(the prompt|--[a-z-]+|[A-Z]+)(?= )", line)
    assert found, line
    parameters = get_command(app).commands[command].params
    shown = {name for each in parameters for name in (*each.opts, each.metavar)} | {THE_PROMPT}
    assert found[2] in shown, line
    assert not re.search(r"\w_\w|\w\.\w", line), line


def texts(folder: Path) -> Iterator[str]:
    """Every string of the modules of a folder, with … for what is formatted in."""
    for module in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_a_field_that_would_help_is_named_by_its_flag() -> None:
    fields = {path for request in COMMANDS for path in paths(request.DESCRIPTOR) if "." not in path}
    said = {text for name in ("core", "frontend") for text in texts(ROOT / "scheduler_svc" / name)}
    found = {text for text in said if any(word in fields for word in re.findall(r"\bset ([a-z_]+)", text))}
    # The last worker that serves is drained by force.
    assert any("set force" in text for text in found)
    for text in found:
        error = errors.InvalidArgument(text, violations=(errors.FieldViolation(field="worker", description=text),))
        line = describe(error)
        assert not [word for word in re.findall(r"\bset ([a-z_]+)", line) if word in fields], line


def test_the_only_worker_is_drained_with_a_flag() -> None:
    said = "worker: w-1 is the only worker that serves; start another one first, set force to let its requests end"
    error = errors.InvalidArgument(said, violations=(errors.FieldViolation(field="worker", description=said),))
    assert describe(error).startswith("WORKER: w-1 is the only worker that serves; start another one first, set --forc")
    assert error.message == said


@pytest.mark.parametrize(
    ("of_generate", "message", "expected"),
    [
        (True, "max_new_tokens is -1; it must be", "--max-new-tokens is -1; it must be"),
        (True, "prompt[2] is -1; it must be", "token 2 of the prompt is -1; it must be"),
        (False, "token_ids[2] is 99; it must be", "ID number 3 is 99; it must be"),
        (False, "request_ids[0] is half a surrogate pair", "ID number 1 is half a surrogate pair"),
    ],
)
def test_a_keyword_of_the_library_is_named_by_its_flag(of_generate: bool, message: str, expected: str) -> None:
    assert keyword_in_flags(message, of_generate=of_generate) == expected
