"""The `tandem` command: its output and its exit codes."""

import json
import os
import signal
import subprocess
import types
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from tandem.v1 import inference_pb2
from typer.main import get_command
from typer.testing import CliRunner

from tandem_client import Client, connection
from tandem_client.cli import flags
from tandem_client.cli.__main__ import app
from tandem_client.cli.commands import serve
from tandem_client.cli.flags import parse_token_ids
from tandem_client.cli.names import FLAGS
from tandem_client.cli.show import closing_line
from tests.client import fake_service as fake
from tests.client.descriptors import paths
from tests.client.fake_service import FakeService
from tests.client.proxied import NAME, Proxied
from tests.client.sampling import EXAMPLES
from tests.rigs.processes import child_environment, popen, run

NOT_FINITE = fake.fails(grpc.StatusCode.INTERNAL, "values that are not finite")


def test_text_streams_to_stdout(tandem, service: FakeService) -> None:
    result = tandem("generate", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Réturn\n", "")
    assert service.requests == [inference_pb2.GenerateRequest(text="hi")]


def test_waits_are_told_on_stderr_and_in_json(tandem, service: FakeService) -> None:
    service.behaviour = fake.waits_first
    result = tandem("generate", "hi")
    assert (result.exit_code, result.stdout) == (0, "Réturn\n")
    assert result.stderr == "waiting: why 1\nwaiting: why 2\n"
    kinds = [next(iter(json.loads(line))) for line in tandem("generate", "hi", "--json").stdout.splitlines()]
    assert kinds == ["accepted", "waiting", "delta", "waiting", "delta", "finished", "summary"]


def test_json_output_contains_the_messages_of_the_api(tandem) -> None:
    result = tandem("generate", "hi", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [next(iter(line)) for line in lines] == ["accepted", "delta", "delta", "finished", "summary"]
    assert lines[1] == {
        "delta": {
            "token_offset": 0, "token_ids": [5], "text": "Ré", "sample_idx": 0, "reasoning": "", "tool_calls": []
        }
    }  # fmt: skip
    # uint64 is a string in protobuf's JSON; fields that are zero are included.
    assert lines[0]["accepted"]["sampling"]["seed"] == str(2**63)
    assert lines[0]["accepted"]["requests_ahead"] == 0
    assert lines[3]["finished"] == {"reason": "FINISH_REASON_LENGTH", "output_tokens": 3, "sample_idx": 0}
    assert ParseDict(lines[4], inference_pb2.GenerateResponse()) == fake.summary(3)


def test_every_flag_reaches_its_field(tandem, service: FakeService) -> None:
    flags = {
        "--model": "m", "--request-id": "r", "-n": 9, "--min-new-tokens": 2,
        **{f"--{name.replace('_', '-')}": value for name, value in EXAMPLES.items()},
        "-t": 0.5, "--num-samples": 1, "--logit-bias": "17=-2.5", "--allow": 7, "--ban": 9, "--logprobs": 2,
        "--prompt-logprobs": 1, "--stop": "a", "--stop-token-id": 3, "--max-time": 1.5, "--priority": -3,
        "--max-queue": 2.5, "--salt": "s", "--bypass-cache": "read", "--linger": 2.5,
    }  # fmt: skip
    arguments = [str(word) for pair in flags.items() for word in pair]
    switches = ["--ignore-eos", "--include-stop", "--no-want-text", "--want-token-ids", "--no-skip-special-tokens"]
    switches += ["--no-add-special-tokens", "--logprob-pieces"]
    repeated = ["--bypass-cache", "write", "--stop", "b", "--logit-bias", "3=1e1", "--allow", "8", "--ban", "10"]
    service.behaviour = fake.endless
    tandem("generate", "hi", *arguments, *repeated, *switches, "--timeout", "0.1")
    (request,) = service.requests
    for part in (request, request.sampling, request.stop, request.output, request.cache, request.resume):
        unset = {field.name for field in part.DESCRIPTOR.fields} - {field.name for field, _ in part.ListFields()}
        assert unset <= {"token_ids", "chat", "constraint"}
    assert request.stop.stop_strings == ["a", "b"]
    assert dict(request.sampling.logit_bias) == {17: -2.5, 3: 10.0}
    assert list(request.sampling.allowed_token_ids.ids) == [7, 8]
    assert list(request.sampling.banned_token_ids) == [9, 10]
    assert (request.output.logprobs, request.output.prompt_logprobs_start) == (2, 1)
    assert request.priority == -3


@pytest.mark.parametrize(("use", "read", "write"), [("read", True, False), ("write", False, True)])
def test_bypass_cache_affects_only_the_named_use(
    tandem, service: FakeService, use: str, read: bool, write: bool
) -> None:
    assert tandem("generate", "hi", "--bypass-cache", use).exit_code == 0
    cache = service.requests[0].cache
    assert (cache.bypass_read, cache.bypass_write, cache.salt) == (read, write, "")


def test_token_ids_are_printed_if_text_is_not_requested(tandem) -> None:
    assert tandem("generate", "hi", "--no-want-text").stdout == "5 6 7 \n"


TABLES = """\
prompt: position, logprob, most probable
       1    -1.000  40=-1.250
       2    -2.000  40=-2.250
       3    -3.000  40=-3.250
sample 0: position, token, logprob, most probable
       0       5    -0.500  40=-0.750
       1       6    -0.750  40=-1.000
sample 1: position, token, logprob, most probable
       0       8    -1.500  40=-1.750
       1       9    -2.500  40=-2.750
"""


def test_samples_are_shown_one_after_another_and_then_the_logprobs(tandem, service: FakeService) -> None:
    service.behaviour = fake.two_samples
    asked = ("generate", "hi", "--num-samples", "2", "--logprobs", "1", "--prompt-logprobs", "0")
    result = tandem(*asked)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"--- sample 0 ---\nRéturn\n--- sample 1 ---\nen\n{TABLES}"
    as_ids = tandem(*asked, "--no-want-text").stdout
    assert as_ids == f"--- sample 0 ---\n5 6 \n--- sample 1 ---\n8 9 \n{TABLES}"
    as_json = [json.loads(line) for line in tandem(*asked, "--json").stdout.splitlines()]
    assert as_json[1]["prompt_info"]["logprobs"]["top_token_ids"] == [40, 40]
    assert as_json[4]["delta"]["logprobs"]["logprobs"] == [-1.5, -2.5]


def test_a_later_sample_streams_once_the_one_before_has_ended(tandem, service: FakeService) -> None:
    service.behaviour = fake.sending(
        fake.delta(0, [1], "a", sample_idx=1), fake.finished(0, sample_idx=0), fake.delta(1, [2], "b", sample_idx=1),
        fake.delta(2, [3], "c", sample_idx=1), fake.delta(0, [4], "d", sample_idx=2), NOT_FINITE,
    )  # fmt: skip
    result = tandem("generate", "hi", "--num-samples", "3")
    assert result.exit_code == 1
    assert result.stdout == "--- sample 0 ---\n\n--- sample 1 ---\nabc\n--- sample 2 ---\nd\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        *(
            ([f"--logit-bias={word}"], f"--logit-bias is {word!r}; it must be ID=X, like 17=-2.5")
            for word in ("17", "17=", "a=1", "17:1", "=1")
        ),
        (["--logit-bias=17=1", "--logit-bias=17=2"], "--logit-bias names token 17 twice; each token has one bias"),
        (["--max-new-tokens=-1"], "--max-new-tokens is -1; it must be 1 to 4294967295"),
    ],
)
def test_wrong_values_are_usage_errors(tandem, service: FakeService, flags: list[str], line: str) -> None:
    result = tandem("generate", "hi", *flags)
    assert (result.exit_code, result.stderr, service.requests) == (2, f"error: {line}\n", [])


def test_token_ids_that_are_not_numbers_are_a_usage_error() -> None:
    assert parse_token_ids("") == []
    with pytest.raises(ValueError, match="'-1'; it must be a whole number, 0 or greater"):
        parse_token_ids("3 -1")


LIMIT = "is 3; the limit is 1"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("code", "details", "exit_code", "line"),
    [
        (INVALID, [fake.bad_request("sampling.top_p", "")], 2, f"--top-p: {LIMIT}"),
        (INVALID, [fake.bad_request("stop.max_new_tokens", "")], 2, f"--max-new-tokens: {LIMIT}"),
        (
            INVALID, [fake.bad_request("sampling.num_samples", "")], 2,
            f"--num-samples: {LIMIT} (tandem info shows the limits)",
        ),
        (grpc.StatusCode.NOT_FOUND, [], 2, f"{LIMIT} (tandem info shows what is served)"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [fake.retry_info(0.5)], 3, f"{LIMIT} (try again in 0.5 s)"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, [], 4, LIMIT),
        (grpc.StatusCode.INTERNAL, [], 1, LIMIT),
    ],
)  # fmt: skip
def test_an_error_prints_one_line_and_sets_the_exit_code(
    tandem, service: FakeService, code: grpc.StatusCode, details: list, exit_code: int, line: str
) -> None:
    service.behaviour = fake.refusing(code, "is 3;\nthe limit is 1", *details)
    result = tandem("generate", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", f"error: {line}\n")


@pytest.mark.parametrize(
    ("field", "message", "line"),
    [
        ("stop.max_new_tokens", "{} is 0; it must be at least 1", "--max-new-tokens is 0; it must be at least 1"),
        ("stop.stop_strings[0]", "{} is empty; a character is needed", "--stop is empty; a character is needed"),
        (
            "sampling.logit_bias[7]", "{} is 300.0; it must be between -100 and 100",
            "--logit-bias of token 7 is 300.0; it must be between -100 and 100",
        ),
        (
            "token_ids.ids[3]", "{} is 999; the vocabulary has 256 tokens",
            "token 3 of the prompt is 999; the vocabulary has 256 tokens (tandem info shows the limits)",
        ),
        (
            "text", "{} has 9 tokens; the model takes 8",
            "the prompt has 9 tokens; the model takes 8 (tandem info shows the limits)",
        ),
        ("stop.min_new_tokens", "{} is 9; stop.max_new_tokens is 8", "--min-new-tokens is 9; --max-new-tokens is 8"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_flag_not_the_field(
    tandem, service: FakeService, field: str, message: str, line: str
) -> None:
    service.behaviour = fake.refusing_field(field, message.format(field))
    assert tandem("generate", "hi").stderr == f"error: {line}\n"


# Fields that only programs set.
WITHOUT_FLAG = {"chat.parallel_tool_calls", "chat.continue_final_message", "chat.add_generation_prompt"}


def test_every_field_of_a_request_is_mapped_to_a_flag_that_exists() -> None:
    flags = {name for parameter in get_command(app).commands["generate"].params for name in parameter.opts}
    assert {"--max-new-tokens", "--stop", "--ban"} <= flags
    fields = {path.removesuffix(".ids") for path in paths(inference_pb2.GenerateRequest.DESCRIPTOR)}
    assert fields - WITHOUT_FLAG <= set(FLAGS)
    assert {flag.split()[0] for flag in FLAGS.values()} - {"the"} <= flags
    # Flags without a field decide how the client connects, reads the prompt and prints the stream.
    unmapped = flags - {flag.split()[0] for flag in FLAGS.values()}
    assert {flag for flag in unmapped if flag.startswith("--")} == {
        "--address", "--json", "--resume", "--retries", "--timeout", "--tls", "--tls-ca", "--tls-cert", "--tls-key",
        "--tls-server-name", "--token-file", "--token-ids", "--system",
    }  # fmt: skip


def test_output_before_an_error_is_kept(tandem, service: FakeService) -> None:
    service.behaviour = fake.sending(fake.delta(0, [5], "R"), NOT_FINITE)
    result = tandem("generate", "hi")
    assert (result.exit_code, result.stdout) == (1, "R\n")
    assert result.stderr == "error: values that are not finite\n"


def test_an_aborted_request_exits_with_an_error(tandem, service: FakeService) -> None:
    done, aborted = inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_ABORTED
    for ends in ((aborted,), (done, aborted)):
        samples = [fake.finished(0, reason, sample_idx=idx) for idx, reason in enumerate(ends)]
        service.behaviour = fake.sending(*samples, fake.summary(0))
        assert tandem("generate", "hi", "--num-samples", str(len(ends))).exit_code == 1


@pytest.mark.parametrize("before", [(), ("-",)])
def test_what_is_piped_is_the_text_of_a_command_without_one(
    tandem, service: FakeService, before: tuple[str, ...]
) -> None:
    assert tandem("generate", *before, stdin="two\nlines\n").stdout == "Réturn\n"
    assert tandem("generate", *before, "--token-ids", stdin="[1, 2,3]\n").exit_code == 0
    assert tandem("chat", stdin="hi\n").stdout == "Réturn\n"
    one, two, chat = service.requests
    assert (one.text, list(two.token_ids.ids)) == ("two\nlines", [1, 2, 3])
    assert list(chat.chat.messages[0].content) == ["hi"]
    assert tandem("tokenize", *before, stdin="hi\n").stdout == "104 105\n"
    assert tandem("detokenize", *before, stdin="104,105\n").stdout == "hi\n"


@pytest.mark.parametrize(
    ("command", "placeholder", "example"),
    [
        ("generate", "PROMPT", 'tandem generate "Return the"'),
        ("tokenize", "TEXT", 'tandem tokenize "Return the"'),
        ("detokenize", "ID", "tandem detokenize 17 4"),
    ],
)
def test_a_terminal_is_not_read_and_what_is_empty_is_named(
    tandem, service: FakeService, monkeypatch: pytest.MonkeyPatch, command: str, placeholder: str, example: str
) -> None:
    empty = "is empty; at least 1 character is needed\n"
    for result in (tandem(command, "-", stdin="\n"), tandem(command, stdin="")):
        assert (result.exit_code, result.stderr) == (2, f"error: standard input {empty}")
    result = tandem(command, "")
    assert (result.exit_code, result.stderr) == (2, f"error: {placeholder} {empty}")
    # Closed, as by a service manager; the runner of the tests gives a file.
    monkeypatch.setattr("tandem_client.cli.flags.sys", types.SimpleNamespace(stdin=None))
    result = tandem(command)
    line = f"error: {placeholder} is missing: {example}, or pipe it to standard input\n"
    assert (result.exit_code, result.stderr) == (2, line)
    terminal = types.SimpleNamespace(stdin=types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("tandem_client.cli.flags.sys", terminal)
    assert tandem(command).stderr == line
    assert service.requests == []


def test_no_more_is_read_than_one_request_can_have(
    tandem, service: FakeService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert flags._MAX_TEXT_BYTES == connection.MAX_MESSAGE_BYTES
    monkeypatch.setattr(flags, "_MAX_TEXT_BYTES", 1000)
    (tmp_path / "long").write_text("x" * 1001)
    most = "has more than 1,000 bytes, the most that one request can have\n"
    for command in ("generate", "tokenize", "detokenize", "chat"):
        assert tandem(command, stdin="x" * 1001).stderr == f"error: standard input {most}"
    for flag in ("--lark", "--json-schema", "--tools"):
        result = tandem("generate", "x", flag, str(tmp_path / "long"))
        assert (result.exit_code, result.stderr) == (2, f"error: {flag}: {tmp_path}/long {most}")
    assert tandem("generate", stdin="x" * 1000).exit_code == 0
    assert len(service.requests) == 1


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_maximum_that_the_model_has_no_room_for_is_told(tandem, service: FakeService, command: str) -> None:
    """The service cuts it to what is left behind the prompt; the fake one to 256."""
    told = tandem(command, "hi", "-n", "99999")
    line = "--max-new-tokens is 99,999; the model's length leaves 256 behind a prompt of 3 tokens\n"
    assert (told.exit_code, told.stdout, told.stderr) == (0, "Réturn\n", line)
    assert tandem(command, "hi", "-n", "256").stderr == "" == tandem(command, "hi").stderr


@pytest.mark.parametrize(
    ("first_tokens", "seconds", "then"),
    [(1, 2.0, ", then 1.0 tokens/s"), (3, 2.0, ""), (1, 0.0004, ""), (1, 0.0, ""), (2, 0.05, ", then 20.0 tokens/s")],
)
def test_a_rate_needs_two_deltas_and_a_time(service: FakeService, first_tokens: int, seconds: float, then: str) -> None:
    with Client(service.address) as client, client.generate("hi") as stream:
        assert len(list(stream)) == 2
        line = closing_line(stream, 0.5, first_tokens, seconds)
    figures = f"3 tokens, ended by length; first after 0.500 s{then}"
    assert line == f"{figures}; 2 of 3 prompt tokens cached; 1 worker change"


@pytest.mark.parametrize("command", ["generate", "tokenize", "detokenize"])
def test_standard_input_that_is_not_utf_8_is_an_error_of_one_line(tandem, command: str) -> None:
    result = tandem(command, "-", stdin="né".encode("latin-1"))
    assert (result.exit_code, result.stderr) == (2, "error: standard input is not UTF-8 (byte 1)\n")


def test_a_message_above_the_size_limit_is_a_usage_error(tandem, service: FakeService) -> None:
    # The fake service has gRPC's own limit of 4 MiB.
    result = tandem("generate", "-", stdin="x" * (4 * 2**20 + 1))
    assert (result.exit_code, service.requests) == (2, [])
    assert result.stderr == "error: the request has 4,194,310 bytes; the service takes 4,194,304 (max_message_bytes)\n"


def test_the_error_of_a_timeout_names_the_flag(tandem, service: FakeService) -> None:
    service.behaviour = fake.endless
    for seconds in ("0", "0.1"):
        result = tandem("generate", "hi", "--timeout", seconds)
        assert (result.exit_code, f" {seconds} s" in result.stderr, result.stderr.count("\n")) == (4, True, 1)


def test_only_a_begun_stream_reports_that_the_service_went_away(tandem, service: FakeService) -> None:
    service.behaviour = fake.sending(fake.breaks)
    hint = "the service went away and the output is incomplete: try again"
    said = f"error: {service.address} closed the connection: Socket closed ({hint})\n"
    assert tandem("generate", "hi").stderr == said
    service.stop()
    for arguments in (["generate", "hi"], ["info"], ["health"]):
        result = tandem(*arguments)
        assert result.exit_code == 3
        assert f"nothing answers at {service.address}: Connection refused (start one with" in result.stderr
        assert result.stderr.count("\n") == 1


def test_short_commands_print_text_and_json(tandem, service: FakeService) -> None:
    assert tandem("tokenize", "hi").stdout == "104 105\n"
    assert json.loads(tandem("tokenize", "-", "--json", stdin="hi\n").stdout) == {"token_ids": [104, 105]}
    assert tandem("detokenize", "104", "105").stdout == "hi\n"
    aborted = tandem("abort", "live-1", "gone")
    assert (aborted.exit_code, aborted.stdout) == (1, "live-1 aborted\ngone not_found\n")
    assert tandem("abort", "live-1").exit_code == 0
    assert tandem("flush").stdout == "12 pages\n"
    assert json.loads(tandem("flush", "--json").stdout) == {"pages": 12}


def test_a_service_that_a_proxy_named_is_printed_and_taken(proxied: Proxied) -> None:
    runner = CliRunner(env={"TANDEM_ADDRESS": proxied.address})
    lines = runner.invoke(app, ["generate", "hi", "--json"]).stdout.splitlines()
    assert [json.loads(line).get("service") for line in lines] == [NAME, None, None, None, None]
    assert runner.invoke(app, ["abort", "live-1", "--service", NAME]).exit_code == 0
    assert proxied.asked["Abort"] == [NAME]


def test_serve_without_the_services_is_an_error(tandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PROGRAMS", ("no_such_scheduler_svc", "no_such_gpu_worker"))
    result = tandem("serve")
    assert result.exit_code == 1
    assert "no_such_scheduler_svc and no_such_gpu_worker are not installed" in result.stderr


def test_ctrl_c_cancels_and_exits_130(service: FakeService) -> None:
    service.behaviour = fake.endless
    ends = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = popen("tandem_client.cli", "generate", "hi", "--address", service.address, text=True, **ends)
    assert process.stdout is not None
    assert process.stdout.read(1) == "R"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=fake.WAIT_SECONDS)
    assert (process.returncode, out, err) == (130, "\n", "")
    assert service.endings[0].wait()


@pytest.mark.parametrize(
    ("arguments", "status"), [(("generate", "hi", "--json"), 141), (("info",), 141), (("generate", "--help"), 1)]
)
def test_closed_output_ends_the_command_in_silence_and_frees_the_request(
    service: FakeService, arguments: tuple[str, ...], status: int
) -> None:
    """A shell reports 141 for a program that SIGPIPE ended; help is printed by rich, which ends with 1."""
    service.behaviour = fake.endless
    reader, writer = os.pipe()
    os.close(reader)
    own = child_environment() | {"TANDEM_ADDRESS": service.address}
    done = run("tandem_client.cli", *arguments, stdout=writer, env=own)
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, "")
    assert all(ending.wait() for ending in service.endings)


def test_output_that_cannot_be_written_is_an_error_of_one_line(service: FakeService) -> None:
    with open("/dev/full", "wb") as full:
        done = run("tandem_client.cli", "info", "--address", service.address, stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")
