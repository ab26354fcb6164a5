"""`tandem generate`: streams the completions of a prompt as text or as JSON lines.

Owns the flags of a request. `show` prints the stream; `flag_names` relates the flags to fields of the API.
"""

from enum import StrEnum
from typing import Annotated

import typer

from tandem_client.cli.flags import (
    CACHE,
    CONNECTION,
    OUTPUT,
    PROMPT,
    SAMPLING,
    STOPPING,
    Address,
    Model,
    SkipSpecialTokens,
    Timeout,
    option,
    switch,
)
from tandem_client.cli.reporting import Exit, fail, reported
from tandem_client.cli.show import print_json, print_text
from tandem_client.cli.values import parse_biases, read_prompt
from tandem_client.connection import DEFAULT_ADDRESS
from tandem_client.sync_client import Client
from tandem_client.types import FinishReason

EXAMPLES = """
Examples:
  tandem generate "Return the" -n 32 --temperature 0
  git diff | tandem generate - --stop "." --json"""


class CacheUse(StrEnum):
    """How a request uses the prefix cache."""

    READ = "read"
    WRITE = "write"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", rich_help_panel=PROMPT, help="Text to complete; - reads it from standard input."
        ),
    ] = None,
    token_ids: Annotated[bool, switch(PROMPT, 'PROMPT is token ids, such as "17 4 256".', "--token-ids")] = False,
    model: Model = None,
    request_id: Annotated[
        str | None,
        option(PROMPT, "NAME", "Id of the request, for tandem abort; at most 128 characters. Default: a random one."),
    ] = None,
    priority: Annotated[int | None, option(PROMPT, "N", "Higher runs first, -1000 to 1000. Default: 0.")] = None,
    temperature: Annotated[
        float | None,
        option(
            SAMPLING,
            "X",
            "0 always takes the most probable token; higher is more random, up to 100. Default: the model's.",
            "--temperature",
            "-t",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        option(
            SAMPLING,
            "P",
            "Sample from the most probable tokens that together reach probability P, above 0 to 1. "
            "Default: the model's.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, option(SAMPLING, "K", "Sample from the K most probable tokens; 0 means all. Default: the model's.")
    ] = None,
    min_p: Annotated[
        float | None,
        option(
            SAMPLING, "P", "Drop tokens less probable than P times the most probable one, 0 to 1. Default: the model's."
        ),
    ] = None,
    seed: Annotated[
        int | None, option(SAMPLING, "N", "The same seed gives the same tokens; at least 0. Default: random.")
    ] = None,
    num_samples: Annotated[
        int | None,
        option(
            SAMPLING, "N", "Number of completions, printed one after another (identical at temperature 0). Default: 1."
        ),
    ] = None,
    presence_penalty: Annotated[
        float | None, option(SAMPLING, "X", "Subtracted from the logits of tokens already generated, -2 to 2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, option(SAMPLING, "X", "Like --presence-penalty, but once per occurrence, -2 to 2.")
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        option(
            SAMPLING,
            "X",
            "Divides positive and multiplies negative logits of tokens in prompt and output, 0.01 to 100; "
            "1 changes nothing.",
        ),
    ] = None,
    logit_bias: Annotated[
        list[str] | None, option(SAMPLING, "ID=X", "Add X, -100 to 100, to the logit of token ID. Repeatable.")
    ] = None,
    allow: Annotated[list[int] | None, option(SAMPLING, "ID", "Sample only from these token ids. Repeatable.")] = None,
    ban: Annotated[list[int] | None, option(SAMPLING, "ID", "Never sample this token id. Repeatable.")] = None,
    max_new_tokens: Annotated[
        int | None,
        option(
            STOPPING,
            "N",
            "Stop after N tokens, at least 1. Default: the service's, see tandem info.",
            "--max-new-tokens",
            "-n",
        ),
    ] = None,
    min_new_tokens: Annotated[
        int | None,
        option(STOPPING, "N", "Generate at least N tokens before EOS or a stop string may end the output. Default: 0."),
    ] = None,
    stop: Annotated[list[str] | None, option(STOPPING, "TEXT", "Stop at this text. Repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, option(STOPPING, "ID", "Stop at this token id. Repeatable.")] = None,
    include_stop: Annotated[bool, switch(STOPPING, "Keep the text that matched --stop.", "--include-stop")] = False,
    ignore_eos: Annotated[
        bool, switch(STOPPING, "Continue past the model's end-of-sequence tokens.", "--ignore-eos")
    ] = False,
    max_time: Annotated[
        float | None,
        option(STOPPING, "SECONDS", "Stop this long after the request was accepted; above 0. The text so far is kept."),
    ] = None,
    as_json: Annotated[bool, switch(OUTPUT, "Print one JSON message per line.", "--json")] = False,
    want_text: Annotated[
        bool | None,
        switch(
            OUTPUT,
            "Stream text; --no-want-text prints token ids. Default: text if the model has a tokenizer.",
            "--want-text/--no-want-text",
        ),
    ] = None,
    want_token_ids: Annotated[
        bool | None,
        switch(OUTPUT, "Stream token ids, which --json shows (default).", "--want-token-ids/--no-want-token-ids"),
    ] = None,
    skip_special_tokens: SkipSpecialTokens = None,
    logprobs: Annotated[
        int | None, option(OUTPUT, "K", "Print the log probability of each token and of the K most probable ones.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, option(OUTPUT, "START", "Print those of the prompt's tokens too, from position START.")
    ] = None,
    salt: Annotated[
        str | None,
        option(CACHE, "TEXT", "Share cached pages only with requests of the same salt; at most 256 characters."),
    ] = None,
    bypass_cache: Annotated[
        list[CacheUse] | None,
        option(
            CACHE, "read|write", "read: compute the whole prompt; write: cache nothing of this request. Repeatable."
        ),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = None,
    retries: Annotated[int, option(CONNECTION, "N", "Retries while the service is not ready; at least 0.", min=0)] = 3,
) -> None:
    """Complete a text and print the output as it is generated."""
    if prompt is None:
        raise fail('PROMPT is missing: tandem generate "Return the", or - to read it from standard input', Exit.USAGE)
    with reported(timeout, of_generate=True), Client(address, max_retries=retries) as client:
        stream = client.generate(
            read_prompt(prompt, token_ids=token_ids),
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
