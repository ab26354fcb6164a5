"""`tandem generate`: streams the completions of a prompt as text or as JSON lines.

Owns the flags of a request. `show` prints the stream; `flags` relates the flags to fields of the API.
"""

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from tandem_client.cli import flags
from tandem_client.cli.flags import PANELS, Service, connects, flag, parameter
from tandem_client.cli.reporting import fail, reported

EXAMPLES = """
Examples:
  tandem generate "Return the" -n 32 --temperature 0
  git diff | tandem generate --stop "." --json"""


class CacheUse(StrEnum):
    READ = "read"
    WRITE = "write"


_PROMPT = typer.Argument(metavar="PROMPT", help="Text to complete. Without it, or with -, standard input is read.")

# Each takes the type of the value, the flag's names with the metavar, and the help.
_prompt, _chat, _constraint, _sampling, _stopping, _output, _cache, _connection = (
    partial(flag, panel) for panel in PANELS
)

# In the order of the help.
_PARAMETERS = (
    parameter("prompt", Annotated[str | None, _PROMPT]),
    _prompt(bool, "--token-ids", 'PROMPT is token ids, such as "17 4 256".'),
    parameter("model", flags.Model),
    parameter("add_special_tokens", flags.AddSpecialTokens),
    _prompt(
        str, "--request-id NAME", "Id of the request, for tandem abort; at most 128 characters. Default: a random one."
    ),
    _prompt(int, "--priority N", "Higher runs first, -1000 to 1000. Default: 0."),
    _prompt(float, "--max-queue SECONDS", "Longest wait for the first step; 0: no limit. Default: 0."),
    _chat(bool, "--chat", "PROMPT is a message of the user, which the model answers by its chat template."),
    _chat(str, "--system TEXT", "The system's message before it; implies --chat."),
    _chat(
        str,
        "--tools JSON",
        "Tools that the model may call, with --chat: a JSON list as in OpenAI's API, or a file with it.",
    ),
    _chat(str, "--tool-choice NAME", "auto, none, required, or the name of a tool. Default: auto with tools."),
    _chat(str, "--template-args JSON", "Arguments of the template, such as '{\"enable_thinking\": false}'."),
    _chat(bool, "--parsed/--no-parsed", "Take reasoning and tool calls out of the text (default)."),
    _constraint(str, "--json-schema JSON", "The output is JSON of this schema; also a file with the schema."),
    _constraint(bool, "--json-object", "The output is a JSON object."),
    _constraint(str, "--regex PATTERN", "The whole output matches this regular expression."),
    _constraint(list[str], "--choice TEXT", "The output is one of these texts. Repeatable."),
    _constraint(str, "--lark FILE", "The output follows the grammar in this file (llguidance's dialect of Lark)."),
    _sampling(
        float,
        "--temperature -t X",
        "0 always takes the most probable token; higher is more random, up to 100. Default: the model's.",
    ),
    _sampling(
        float,
        "--top-p P",
        "Sample from the most probable tokens that together reach probability P, 0 to 1; "
        "0 takes the most probable one. Default: the model's.",
    ),
    _sampling(int, "--top-k K", "Sample from the K most probable tokens; 0 means all. Default: the model's."),
    _sampling(
        float,
        "--min-p P",
        "Drop tokens less probable than P times the most probable one, 0 to 1. Default: the model's.",
    ),
    _sampling(
        float,
        "--typical-p P",
        "Sample from the tokens of most typical information that together reach probability P, above 0 to 1; "
        "1 keeps all.",
    ),
    _sampling(int, "--seed N", "The same seed gives the same tokens; at least 0. Default: random."),
    _sampling(
        int,
        "--num-samples N",
        "Number of completions, printed one after another (identical at temperature 0). Default: 1.",
    ),
    _sampling(float, "--presence-penalty X", "Subtracted from the logits of tokens already generated, -2 to 2."),
    _sampling(float, "--frequency-penalty X", "Like --presence-penalty, but once per occurrence, -2 to 2."),
    _sampling(
        float,
        "--repetition-penalty X",
        "Divides positive and multiplies negative logits of tokens in prompt and output, 0.01 to 100; "
        "1 changes nothing.",
    ),
    _sampling(list[str], "--logit-bias ID=X", "Add X, -100 to 100, to the logit of token ID. Repeatable."),
    _sampling(list[int], "--allow ID", "Sample only from these token ids. Repeatable."),
    _sampling(list[int], "--ban ID", "Never sample this token id. Repeatable."),
    _stopping(
        int, "--max-new-tokens -n N", "Stop after N tokens, at least 1. Default: the service's, see tandem info."
    ),
    _stopping(
        int,
        "--min-new-tokens N",
        "Generate at least N tokens before EOS or a stop string may end the output. Default: 0.",
    ),
    _stopping(list[str], "--stop TEXT", "Stop at this text. Repeatable."),
    _stopping(list[int], "--stop-token-id ID", "Stop at this token id. Repeatable."),
    _stopping(bool, "--include-stop", "Keep the text that matched --stop."),
    _stopping(bool, "--ignore-eos", "Continue past the model's end-of-sequence tokens."),
    _stopping(
        float, "--max-time SECONDS", "Stop this long after the request was accepted; above 0. The text so far is kept."
    ),
    _output(bool, "--json", "Print one JSON message per line."),
    _output(
        bool,
        "--want-text/--no-want-text",
        "Stream text; --no-want-text prints token ids. Default: text if the model has a tokenizer.",
    ),
    _output(bool, "--want-token-ids/--no-want-token-ids", "Stream token ids, which --json shows (default)."),
    parameter("skip_special_tokens", flags.SkipSpecialTokens),
    _output(int, "--logprobs K", "Print the log probability of each token and of the K most probable ones."),
    _output(int, "--prompt-logprobs START", "Print those of the prompt's tokens too, from position START."),
    _output(bool, "--logprob-pieces", "Print with them what each token adds to the text."),
    _cache(str, "--salt TEXT", "Share cached pages only with requests of the same salt; at most 256 characters."),
    _cache(
        list[CacheUse],
        "--bypass-cache read|write",
        "read: compute the whole prompt; write: cache nothing of this request. Repeatable.",
    ),
    _connection(
        bool,
        "--resume",
        "Continue if the connection or the service's front end is lost; not with --logprobs.",
    ),
    _connection(
        float,
        "--linger SECONDS",
        "How long the request goes on without this command, 0 to 600. Default: 60 with --resume, else 0.",
    ),
    parameter("service", Service),
    parameter("timeout", flags.Timeout),
    _connection(int, "--retries N", "Retries while the service is not ready; at least 0.", 3, min=0),
)


@connects
@flags.takes(_PARAMETERS)
def generate(
    *,
    prompt: str | None,
    token_ids: bool,
    chat: bool | None,
    system: str | None,
    json: bool,
    service: Service,
    timeout: float | None,
    retries: int,
    resume: bool | None,
    **options: Any,
) -> None:
    """Complete a text and print the output as it is generated."""
    with reported(timeout, of_generate=True), service.client(max_retries=retries) as client:
        text = flags.given_or_piped(prompt, "PROMPT", 'tandem generate "Return the"')
        given = flags.parse_token_ids(text) if token_ids else text
        keywords = _keywords(**options)
        if chat or system is not None:
            given, keywords["chat"] = None, flags.read_chat(given, system)
        # Imported only here, because it brings rich.
        from tandem_client.cli.show import print_json, print_text
        from tandem_client.types import FinishReason

        stream = client.generate(given, timeout=timeout, resume=bool(resume), **keywords)
        with stream:
            if json:
                print_json(stream)
            else:
                print_text(stream, ids=options["want_text"] is False, asked=options["max_new_tokens"])
        if any(sample.finished and sample.finished.reason == FinishReason.ABORTED for sample in stream.samples):
            raise fail("the request was aborted")


def _keywords(*, logit_bias: list[str] | None, bypass_cache: list[CacheUse] | None, **options: Any) -> dict[str, Any]:
    """Returns the keywords of `Client.generate`. Raises ValueError."""
    from tandem_client.wire.parts import TOOL_CHOICES

    choice: str | None = options["tool_choice"]
    return {
        **options,
        "tools": flags.read_json("--tools", options["tools"], list),
        "tool_choice": choice if choice in (*TOOL_CHOICES, None) else {"function": {"name": choice}},
        "template_args": flags.read_json("--template-args", options["template_args"], dict),
        "json_schema": flags.read_json("--json-schema", options["json_schema"], (dict, bool)),
        "lark": flags.read_file(options["lark"], "--lark") if options["lark"] else None,
        "choices": options["choices"] or None,
        "logit_bias": flags.parse_biases(logit_bias) if logit_bias else None,
        "bypass_cache_read": CacheUse.READ in (bypass_cache or ()) or None,
        "bypass_cache_write": CacheUse.WRITE in (bypass_cache or ()) or None,
    }
