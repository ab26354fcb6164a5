"""Builds requests from keywords.

Owns the keywords of `generate` and the field that each one sets. Checks only that a message can hold the values; the
service checks every limit.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypedDict, Unpack, cast

from google.protobuf.descriptor import FieldDescriptor
from tandem.v1 import control_pb2, inference_pb2

from tandem_client.types import SampleOffset

# Text, tokenized by the service, or token ids, used as they are.
Prompt = str | Iterable[int]


class GenerateOptions(TypedDict, total=False):
    """The options of `generate`. None means the service's default, as if the option were absent."""

    request_id: str | None
    model: str | None
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
    # Pages are shared only between requests of the same salt.
    cache_salt: str | None
    # Compute the whole prompt; do not cache its pages.
    bypass_cache_read: bool | None
    bypass_cache_write: bool | None
    # Seconds for which the request goes on without a reader and its answer is kept; 60 with `resume=True`.
    linger_seconds: float | None


def _fields(part: str) -> list[str]:
    """The names of the fields of a submessage of GenerateRequest."""
    return [field.name for field in getattr(inference_pb2.GenerateRequest(), part).DESCRIPTOR.fields]


# Fields that have a keyword of another name.
_KEYWORDS = {
    "stop_strings": "stop",
    "salt": "cache_salt",
    "bypass_read": "bypass_cache_read",
    "bypass_write": "bypass_cache_write",
}
# Keyword: path of the submessage of GenerateRequest ("" for the request itself), field in it.
_PLACES: Mapping[str, tuple[str, str]] = {
    **{name: ("", name) for name in ("request_id", "model", "priority", "max_queue_seconds")},
    **{
        _KEYWORDS.get(field, field): (part, field)
        for part in ("sampling", "stop", "output", "cache", "resume")
        for field in _fields(part)
    },
    "allowed_token_ids": ("sampling.allowed_token_ids", "ids"),
}

# Path of a field of GenerateRequest to the keyword that sets it, as errors need it.
FIELD_KEYWORDS: Mapping[str, str] = {
    **{f"{path}.{field}" if path else field: name for name, (path, field) in _PLACES.items()},
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "sampling.allowed_token_ids": "allowed_token_ids",
}

# The same for the fields of ResumeRequest.
RESUME_KEYWORDS: Mapping[str, str] = {"request_id": "request_id", "resume_secret": "secret", "offsets": "offsets"}

# The range of each kind of integer field.
_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# Options for which every service refuses 0.
_FROM_ONE = frozenset({"max_new_tokens", "num_samples"})


def generate_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> inference_pb2.GenerateRequest:
    """Returns the request with these options.

    Raises TypeError for an unknown keyword or a value of the wrong type and ValueError for a number that its field
    cannot hold or a text with half a surrogate pair, both naming the keyword.
    """
    request = inference_pb2.GenerateRequest()
    if isinstance(prompt, str):
        _assign("prompt", request, "text", prompt)
    elif isinstance(prompt, bytes | bytearray):
        raise TypeError("prompt is bytes: give text or token ids")
    else:
        request.token_ids.SetInParent()
        _assign("prompt", request.token_ids, "ids", prompt)
    for name, value in options.items():
        if name not in _PLACES:
            close = get_close_matches(name, _PLACES, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(_PLACES))}"
            raise TypeError(f"generate() takes no keyword {name}{hint}")
        if value is not None:
            path, field = _PLACES[name]
            part: Any = request
            for step in path.split(".") if path else ():
                part = getattr(part, step)
                # An empty list differs from an absent one.
                part.SetInParent()
            _assign(name, part, field, value)
    return request


def resume_request(request_id: str, secret: bytes, offsets: Iterable[SampleOffset]) -> inference_pb2.ResumeRequest:
    """Returns the request for the rest of a stream. Raises as `generate_request` does."""
    request = inference_pb2.ResumeRequest()
    _assign("request_id", request, "request_id", request_id)
    _assign("secret", request, "resume_secret", secret)
    for idx, offset in enumerate(cast(Iterable[object], offsets)):
        if not isinstance(offset, SampleOffset):
            raise TypeError(f"offsets[{idx}] is {offset!r:.60}; a SampleOffset is needed")
        message = request.offsets.add()
        _assign(f"offsets[{idx}].token_ids", message, "token_ids", offset.token_ids)
        _assign(f"offsets[{idx}].text_chars", message, "text_chars", offset.text_chars)
    return request


def tokenize_request(text: str, *, model: str | None) -> inference_pb2.TokenizeRequest:
    """Returns the request for the token ids of a text. Raises as `generate_request` does."""
    request = inference_pb2.TokenizeRequest()
    _assign("text", request, "text", text)
    _assign("model", request, "model", model or "")
    return request


def detokenize_request(
    token_ids: Iterable[int], *, skip_special_tokens: bool | None, model: str | None
) -> inference_pb2.DetokenizeRequest:
    """Returns the request for the text of token ids. Raises as `generate_request` does."""
    request = inference_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _assign("model", request, "model", model or "")
    _assign("token_ids", request, "token_ids", token_ids)
    return request


def abort_request(request_ids: Iterable[str]) -> control_pb2.AbortRequest:
    """Returns the request that aborts other requests. Raises as `generate_request` does."""
    request = control_pb2.AbortRequest()
    _assign("request_ids", request, "request_ids", request_ids)
    return request


def _assign(name: str, message: Any, field: str, value: Any) -> None:
    descriptor: FieldDescriptor = message.DESCRIPTOR.fields_by_name[field]
    try:
        if descriptor.message_type is not None:
            # The only messages here are the entries of maps.
            for key, entry in _entries(value):
                getattr(message, field)[key] = entry
        elif descriptor.is_repeated:
            getattr(message, field).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, field, value)
    except UnicodeEncodeError as error:
        # Python's strings may hold half a surrogate pair; it decodes bytes that are not UTF-8 into such strings.
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"{name} has {code} at character {error.start}; it is not Unicode text") from None
    except (TypeError, ValueError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        why = str(error)
        which = "each" if descriptor.is_repeated else "it"
        if descriptor.message_type is not None:
            which, descriptor = "each token id", descriptor.message_type.fields_by_name["key"]
        if isinstance(error, ValueError) and descriptor.cpp_type in _RANGES:
            low, high = _RANGES[descriptor.cpp_type]
            why = f"{which} must be {max(low, 1) if name in _FROM_ONE else low} to {high}"
        raise type(error)(f"{name} is {shown}; {why}") from None


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError("a mapping from token ids to numbers is needed")
    return cast(Mapping[Any, Any], value).items()
