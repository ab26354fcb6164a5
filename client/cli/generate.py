"""`tandem generate`: one completion, streamed to the terminal or as JSON lines.

Owns the flags of a request and how a stream is shown.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from tandem.v1 import inference_pb2

from client.cli.flags import Address, Json, Model, Timeout
from client.cli.reporting import Exit, fail, reported
from client.cli.stdin import read_text
from client.connection import DEFAULT_ADDRESS
from client.request import Prompt
from client.sync_client import Client
from client.sync_stream import GenerateStream
from client.types import FinishReason


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids, not text.")] = False,
    model: Model = None,
    request_id: Annotated[str | None, typer.Option(help="Your name for the request.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", "-n", help="End after so many tokens; default: the service's, in tandem info."
        ),
    ] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(help="No token and no stop string ends it before so many; default 0.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens that make up this much; default: the model's.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all.")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the likeliest one's probability; default: the model's."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed draws the same tokens; default: a random one.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Keep what matched in the text.")] = False,
    max_time: Annotated[float | None, typer.Option(help="End after so many seconds.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    want_text: Annotated[
        bool | None,
        typer.Option("--want-text/--no-want-text", help="Stream text; default: yes, where the model has a tokenizer."),
    ] = None,
    want_token_ids: Annotated[
        bool | None, typer.Option("--want-token-ids/--no-want-token-ids", help="Stream token ids; default: yes.")
    ] = None,
    skip_special_tokens: Annotated[bool | None, typer.Option("--skip-special-tokens/--no-skip-special-tokens")] = None,
    retries: Annotated[int, typer.Option(min=0, help="Tries while the service is not ready yet.")] = 3,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Complete a text and stream what comes."""
    if prompt is None:
        raise fail("no prompt is given: tandem generate TEXT, or - to read it from standard input", Exit.USAGE)
    with reported(address, timeout), Client(address, max_retries=retries) as client:
        stream = client.generate(
            _prompt(prompt, token_ids=token_ids),
            timeout=timeout,
            model=model,
            request_id=request_id,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_id,
            ignore_eos=ignore_eos or None,
            include_stop=include_stop or None,
            max_time_seconds=max_time,
            priority=priority,
            want_text=want_text,
            want_token_ids=want_token_ids,
            skip_special_tokens=skip_special_tokens,
        )
        with stream:
            if as_json:
                _print_json(stream)
            else:
                _print_text(stream, ids=want_text is False)
        if stream.finished and stream.finished.reason == FinishReason.ABORTED:
            raise fail("the request was aborted")


def json_line(message: inference_pb2.GenerateResponse) -> str:
    """The protobuf JSON mapping with the fields' own names; fields without presence are always there."""
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(values, ensure_ascii=False, sort_keys=True)


def parse_token_ids(text: str) -> Sequence[int]:
    """Numbers with blanks or commas between them, in brackets or not. Raises ValueError."""
    words = text.strip().strip("[]").replace(",", " ").split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"token ids are numbers from 0: {wrong[:40]!r} is none")
    return [int(word) for word in words]


def _prompt(argument: str, *, token_ids: bool) -> Prompt:
    # The shell's last line break is not part of the text.
    text = read_text().removesuffix("\n") if argument == "-" else argument
    if not text:
        # The service would call it text, the name of its field.
        raise ValueError("the prompt is empty; at least 1 character is needed")
    return parse_token_ids(text) if token_ids else text


def _print_json(stream: GenerateStream) -> None:
    for message in stream.messages():
        print(json_line(message), flush=True)


def _print_text(stream: GenerateStream, *, ids: bool) -> None:
    first: float | None = None
    started = time.monotonic()
    try:
        for delta in stream:
            first = first or time.monotonic()
            shown = " ".join(map(str, delta.token_ids)) + " " if ids else delta.text
            print(shown, end="", flush=True)
    finally:
        if first is not None:
            print(flush=True)
    if sys.stderr.isatty() and first is not None:
        Console(stderr=True, highlight=False).print(
            _closing_line(stream, first - started, time.monotonic() - first), style="dim"
        )


def _closing_line(stream: GenerateStream, first_seconds: float, decode_seconds: float) -> str:
    assert stream.finished is not None
    num_tokens = stream.finished.output_tokens
    rate = (num_tokens - 1) / decode_seconds if num_tokens > 1 and decode_seconds > 0 else 0.0
    return (
        f"{num_tokens} tokens, ended by {stream.finished.reason}; "
        f"first after {first_seconds:.3f} s, then {rate:.1f} tokens/s"
    )
