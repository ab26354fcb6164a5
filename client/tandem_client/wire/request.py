"""Builds requests from keywords, and the metadata by which a proxy in front of several services finds the right one.

Owns the keywords of `generate`, the field that each one sets, and the affinity of a request: a hash of the salt and of
a prompt's beginning, by which requests with a common beginning reach one service. Checks only that a message can hold
the values; the service checks every limit.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, Unpack, cast

from tandem.v1 import chat_pb2, inference_pb2

from tandem_client.types import SampleOffset
from tandem_client.wire import parts

# Text, tokenized by the service, or token ids, used as they are.
Prompt = str | Iterable[int]

AFFINITY_KEY = "tandem-affinity"
# A proxy names the service of a request so, in the metadata of its answer; calls with that metadata go there.
SERVICE_KEY = "tandem-cell"
# The beginning of a prompt: as much as system prompts have in common, and no more than the first turn of most chats.
_CHARACTERS, _TOKEN_IDS = 1024, 256
_KEY_BYTES = 8
_NAME = re.compile(r"[!-~]+")


class GenerateOptions(parts.ChatKeywords, parts.ConstraintOptions, total=False):
    """The options of `generate`. None means the service's default, as if the option were absent."""

    # A conversation, in place of a prompt.
    chat: parts.ChatMessages | None
    request_id: str | None
    model: str | None
    # For a text: the special tokens that the tokenizer adds to a prompt.
    add_special_tokens: bool | None
    priority: int | None
    # Seconds that the request may wait for its first step; 0: no limit.
    max_queue_seconds: float | None
    # 0 is greedy.
    temperature: float | None
    top_p: float | None
    # 0 keeps all tokens.
    top_k: int | None
    min_p: float | None
    # Locally typical sampling; 1 switches it off.
    typical_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    # 1 changes nothing.
    repetition_penalty: float | None
    # The number of completions of the prompt.
    num_samples: int | None
    # Token id to the number that is added to its logit.
    logit_bias: Mapping[int, float] | None
    # Sample only from these token ids; an empty list is refused.
    allowed_token_ids: Iterable[int] | None
    banned_token_ids: Iterable[int] | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    # Strings that end a sample; a single string needs no list.
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    max_time_seconds: float | None
    want_text: bool | None
    want_token_ids: bool | None
    skip_special_tokens: bool | None
    # Number of the most probable tokens to return with each token; 0 returns only the token's own logprob.
    logprobs: int | None
    # The first position in the prompt with a logprob in the answer.
    prompt_logprobs_start: int | None
    # Return what each token with a logprob, and each alternative, adds to the text.
    logprob_pieces: bool | None
    # Pages are shared only between requests of the same salt.
    cache_salt: str | None
    # Compute the whole prompt; do not cache its pages.
    bypass_cache_read: bool | None
    bypass_cache_write: bool | None
    # Seconds for which the request goes on without a reader and its answer is kept; 60 with `resume=True`.
    linger_seconds: float | None


FIELD_KEYWORDS = parts.FIELD_KEYWORDS
# Keyword: path of the field that it sets, of those for which nothing else is to be done.
PLACES = {
    keyword: path
    for path, keyword in FIELD_KEYWORDS.items()
    if keyword not in ("prompt", *parts.CHAT_FIELDS.values(), *parts.CONSTRAINT_FIELDS.values())
}
_KEYWORDS = {*FIELD_KEYWORDS.values()} - {"prompt"}

# The same for the fields of ResumeRequest.
RESUME_KEYWORDS: Mapping[str, str] = {"request_id": "request_id", "resume_secret": "secret", "offsets": "offsets"}


def generate_request(prompt: Prompt | None, **options: Unpack[GenerateOptions]) -> inference_pb2.GenerateRequest:
    """Returns the request with these options.

    Raises TypeError for an unknown keyword, a value of the wrong type, or not exactly one of prompt and `chat`, and
    ValueError for a number that its field cannot hold or a text with half a surrogate pair; all name the keyword.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := [name for name in options if name not in _KEYWORDS]:
        close = get_close_matches(unknown[0], _KEYWORDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(_KEYWORDS))}"
        raise TypeError(f"generate() takes no keyword {unknown[0]}{hint}")
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt, {name: given[name] for name in parts.CHAT_FIELDS.values() if name in given})
    limits = {name: given[name] for name in parts.CONSTRAINT_FIELDS.values() if name in given}
    if (made := parts.constraint(**cast(parts.ConstraintOptions, limits))) is not None:
        request.constraint.CopyFrom(made)
    for name, path in PLACES.items():
        if name in given:
            part: Any = request
            *steps, field = path.split(".")
            for step in steps:
                part = getattr(part, step)
                # An empty list differs from an absent one.
                part.SetInParent()
            parts.assign(name, part, field, given[name])
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt | None, chat: dict[str, Any]) -> None:
    messages = chat.pop("chat", None)
    if (prompt is None) == (messages is None):
        both = "both prompt and chat are given" if prompt is not None else "neither prompt nor chat is given"
        raise TypeError(f"{both}; one of them is needed")
    if messages is not None:
        request.chat.CopyFrom(parts.chat_prompt(messages, **cast(parts.ChatKeywords, chat)))
    elif chat:
        raise TypeError(f"{next(iter(chat))} is for a chat; the request has a prompt")
    elif isinstance(prompt, str):
        parts.assign("prompt", request, "text", prompt)
    elif isinstance(prompt, bytes | bytearray):
        raise TypeError("prompt is bytes: give text or token ids")
    else:
        request.token_ids.SetInParent()
        parts.assign("prompt", request.token_ids, "ids", prompt)


def resume_request(request_id: str, secret: bytes, offsets: Iterable[SampleOffset]) -> inference_pb2.ResumeRequest:
    """Returns the request for the rest of a stream. Raises as `generate_request` does."""
    request = inference_pb2.ResumeRequest()
    parts.assign("request_id", request, "request_id", request_id)
    parts.assign("secret", request, "resume_secret", secret)
    for idx, offset in enumerate(cast(Iterable[object], offsets)):
        if not isinstance(offset, SampleOffset):
            raise TypeError(f"offsets[{idx}] is {offset!r:.60}; a SampleOffset is needed")
        parts.fill(request.offsets.add(), f"offsets[{idx}].", **asdict(offset))
    return request


def affinity_of(request: inference_pb2.GenerateRequest) -> str:
    """16 hexadecimal digits, equal for requests of equal salt and beginning. It does not reveal the salt."""
    hashed = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"tandem-affinity")
    if request.HasField("chat"):
        start = "".join(_beginning(request.chat))[:_CHARACTERS].encode()
    elif request.HasField("token_ids"):
        start = ",".join(map(str, request.token_ids.ids[:_TOKEN_IDS])).encode()
    else:
        start = request.text[:_CHARACTERS].encode()
    for part in (request.cache.salt.encode(), start):
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()


def to_service(service: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata by which a proxy sends a call to this service. Raises ValueError for what names none."""
    if service is None:
        return ()
    if _NAME.fullmatch(service) is None:
        raise ValueError(f"service is {service!r:.60}; it must be a stream's `service`: printable ASCII without blanks")
    return ((SERVICE_KEY, service),)


def service_in(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the service that a proxy names in the metadata of an answer; None without one."""
    return next((value for name, value in metadata if name == SERVICE_KEY and isinstance(value, str)), None)


def _beginning(chat: chat_pb2.Chat) -> Iterator[str]:
    """What all turns of a conversation begin with: tools, and the messages up to the first one of the user."""
    yield from chat.tools_json
    for message in chat.messages:
        yield from (message.role, *message.content)
        if message.role == "user":
            return
