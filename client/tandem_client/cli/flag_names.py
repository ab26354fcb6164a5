"""Fields of a GenerateRequest by the flags of `tandem generate` that set them.

Owns the table and the wording of messages that name fields; a test compares the table with the flags themselves.
"""

import re
from collections.abc import Mapping

from tandem_client.errors import TandemError
from tandem_client.field_names import with_names
from tandem_client.request import FIELD_KEYWORDS

_PROMPT = "the prompt"
FLAGS: Mapping[str, str] = {
    "request_id": "--request-id",
    "model": "--model",
    "text": _PROMPT,
    "token_ids": _PROMPT,
    "token_ids.ids": _PROMPT,
    "priority": "--priority",
    "sampling.temperature": "--temperature",
    "sampling.top_p": "--top-p",
    "sampling.top_k": "--top-k",
    "sampling.min_p": "--min-p",
    "sampling.seed": "--seed",
    "sampling.presence_penalty": "--presence-penalty",
    "sampling.frequency_penalty": "--frequency-penalty",
    "sampling.repetition_penalty": "--repetition-penalty",
    "sampling.num_samples": "--num-samples",
    "sampling.logit_bias": "--logit-bias",
    "sampling.allowed_token_ids": "--allow",
    "sampling.allowed_token_ids.ids": "--allow",
    "sampling.banned_token_ids": "--ban",
    "stop.max_new_tokens": "--max-new-tokens",
    "stop.min_new_tokens": "--min-new-tokens",
    "stop.stop_strings": "--stop",
    "stop.stop_token_ids": "--stop-token-id",
    "stop.ignore_eos": "--ignore-eos",
    "stop.include_stop": "--include-stop",
    "stop.max_time_seconds": "--max-time",
    "output.want_text": "--want-text",
    "output.want_token_ids": "--want-token-ids",
    "output.skip_special_tokens": "--skip-special-tokens",
    "output.logprobs": "--logprobs",
    "output.prompt_logprobs_start": "--prompt-logprobs",
    "cache.salt": "--salt",
    "cache.bypass_read": "--bypass-cache read",
    "cache.bypass_write": "--bypass-cache write",
}
_OF_KEYWORD = {FIELD_KEYWORDS[path]: flag for path, flag in FLAGS.items()}
_INDEXED = re.compile(rf"({_PROMPT}|--[a-z-]+)\[(\d+)\]")


def refusal_in_flags(error: TandemError) -> str:
    """The service's message, with flags in place of fields; prefixed with the flag at fault if it names none."""
    message = with_names(error.service_message, FLAGS, field=error.field)
    flag = with_names(error.field, FLAGS, field=error.field) if error.field else ""
    return _INDEXED.sub(_without_index, message if flag in message else f"{flag}: {message}")


def keyword_in_flags(message: str) -> str:
    """A message of `request`, which begins with a keyword, with the flag in its place."""
    keyword, blank, rest = message.partition(" ")
    return f"{_OF_KEYWORD.get(keyword, keyword)}{blank}{rest}"


def _without_index(found: re.Match[str]) -> str:
    """A flag is repeated, not indexed. Biases are indexed by token, not by place."""
    if found[1] == _PROMPT:
        return f"token {found[2]} of the prompt"
    return f"--logit-bias of token {found[2]}" if found[1] == "--logit-bias" else found[1]
