"""`tandem generate`: a prompt's completions, streamed to the terminal or as JSON lines.

Owns the flags of a request; `show` owns how a stream is shown.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from client.cli.flags import Address, Json, Model, Timeout
from client.cli.reporting import Exit, fail, reported
from client.cli.show import print_json, print_text
from client.cli.stdin import read_text
from client.connection import DEFAULT_ADDRESS
from client.request import Prompt
from client.sync_client import Client
from client.types import FinishReason


class CacheUse(StrEnum):
    """What a request does with pages that are kept."""

    READ = "read"
    WRITE = "write"


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
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken off the logits of tokens in the output, -2 to 2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once for each time they are there, -2 to 2.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides the logits of tokens in prompt or output; 1 is none.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(help="So many completions, one shown after another; greedy ones are alike.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Add BIAS to token ID's logit; may be repeated.")
    ] = None,
    allow: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Draw this token and no other; may be repeated.")
    ] = None,
    ban: Annotated[list[int] | None, typer.Option(metavar="ID", help="Never draw this token; may be repeated.")] = None,
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
    logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="Table of logprobs, with the K likeliest tokens beside each.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(metavar="START", help="The same of the prompt's tokens, from position START on.")
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="Share cached pages only with requests of the same salt; default: an empty one.")
    ] = None,
    bypass_cache: Annotated[
        list[CacheUse] | None,
        typer.Option(help="read: compute the whole prompt; write: keep nothing of it. May be repeated."),
    ] = None,
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
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            num_samples=num_samples,
            logit_bias=parse_biases(logit_bias) if logit_bias else None,
            allowed_token_ids=allow,
            banned_token_ids=ban,
            stop=stop,
            stop_token_ids=stop_token_id,
            ignore_eos=ignore_eos or None,
            include_stop=include_stop or None,
            max_time_seconds=max_time,
            priority=priority,
            want_text=want_text,
            want_token_ids=want_token_ids,
            skip_special_tokens=skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs_start=prompt_logprobs,
            cache_salt=salt,
            bypass_cache_read=CacheUse.READ in (bypass_cache or ()) or None,
            bypass_cache_write=CacheUse.WRITE in (bypass_cache or ()) or None,
        )
        with stream:
            if as_json:
                print_json(stream)
            else:
                print_text(stream, ids=want_text is False)
        if any(sample.finished and sample.finished.reason == FinishReason.ABORTED for sample in stream.samples):
            raise fail("the request was aborted")


def parse_token_ids(text: str) -> Sequence[int]:
    """Numbers with blanks or commas between them, in brackets or not. Raises ValueError."""
    words = text.strip().strip("[]").replace(",", " ").split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"token ids are numbers from 0: {wrong[:40]!r} is none")
    return [int(word) for word in words]


def parse_biases(given: Sequence[str]) -> dict[int, float]:
    """Words like 17=-2.5. Raises ValueError."""
    biases: dict[int, float] = {}
    for word in given:
        token, is_pair, bias = word.partition("=")
        try:
            if not is_pair:
                raise ValueError
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias is {word[:40]!r}; it must be ID=BIAS, like 17=-2.5") from None
        if token_id in biases:
            raise ValueError(f"--logit-bias names token {token_id} twice; one bias for each")
        biases[token_id] = value
    return biases


def _prompt(argument: str, *, token_ids: bool) -> Prompt:
    # The shell's last line break is not part of the text.
    text = read_text().removesuffix("\n") if argument == "-" else argument
    if not text:
        # The service would call it text, the name of its field.
        raise ValueError("the prompt is empty; at least 1 character is needed")
    return parse_token_ids(text) if token_ids else text
