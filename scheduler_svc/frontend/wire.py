"""Owns the check of what callers send and its translation to the core's Submit. Knows nothing of streams or sockets.

Every refusal is INVALID_ARGUMENT (an unknown model NOT_FOUND) and names the field, the number and the limit. The
request is checked before its text is tokenized, and its length after.
"""

import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2

from scheduler_svc.frontend import status
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.text import Text

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 100
MAX_PRIORITY = 1000
# A week.
MAX_TIME_SECONDS = 604_800


class Malformed:
    """Stands where a request would, had its bytes been one."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request of which all but the prompt's length is known to be good."""

    request_id: str
    sampling: inference_pb2.SamplingParams
    stop: inference_pb2.StopParams
    stop_strings: tuple[str, ...]
    priority: int
    want_text: bool
    want_token_ids: bool
    skip_special_tokens: bool


def check_known(message: Message | Malformed) -> None:
    """Refuses bytes that are no such message, and fields that this server does not know, at every level."""
    if isinstance(message, Malformed):
        raise status.invalid(message.name, f"the bytes sent are no {message.name}")
    name = message.DESCRIPTOR.name
    for unknown in UnknownFieldSet(message):
        number = unknown.field_number
        raise status.invalid(f"{name}.{number}", f"{name} has field number {number}, which this server does not know")
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                check_known(part)


def check_request(request: inference_pb2.GenerateRequest, model: Model) -> Checked:
    """Checks everything but the prompt. Raises Refusal."""
    check_known(request)
    model.check_name(request.model)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    stop_strings = _check_stop(request.stop, model)
    output = request.output
    return Checked(
        request_id=_check_request_id(request.request_id),
        sampling=_effective_sampling(request.sampling, model),
        stop=request.stop,
        stop_strings=stop_strings,
        priority=request.priority,
        want_text=_check_want_text(output, model),
        want_token_ids=not output.HasField("want_token_ids") or output.want_token_ids,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
    )


async def prompt_ids(request: inference_pb2.GenerateRequest, model: Model) -> Sequence[int]:
    """The prompt's token ids, tokenized where it is text. Raises Refusal."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise status.invalid("prompt", "prompt is missing; give text or token_ids")
    if kind == "text":
        return await text_ids("text", request.text, model)
    check_token_ids("token_ids.ids", request.token_ids.ids, model)
    return request.token_ids.ids


async def text_ids(field: str, text: str, model: Model) -> list[int]:
    """The ids of a text. Raises Refusal where the model has no tokenizer, or the text is empty or too long."""
    if model.text is None:
        raise status.invalid(field, f"{field} needs a tokenizer, and the served model came without one")
    model.text.check_size(field, text)
    token_ids = await model.text.encode(text)
    if not token_ids:
        raise status.invalid(field, f"{field} has {len(text)} characters that make 0 tokens; 1 is needed")
    # The tokenizer may know more tokens than the model has embeddings for.
    check_token_ids(field, token_ids, model)
    return token_ids


def check_token_ids(field: str, token_ids: Sequence[int], model: Model) -> None:
    """Refuses an empty list, and ids outside the vocabulary."""
    if not token_ids:
        raise status.invalid(field, f"{field} is empty; at least 1 token is needed")
    if max(token_ids) >= model.info.vocab_size:
        idx = next(i for i, token in enumerate(token_ids) if token >= model.info.vocab_size)
        message = f"{field}[{idx}] is {token_ids[idx]}; the vocabulary has {model.info.vocab_size} tokens"
        raise status.invalid(f"{field}[{idx}]", message)


def make_submit(
    checked: Checked, token_ids: Sequence[int], model: Model, *, stream: int, deadline_seconds: float
) -> frontend_pb2.Submit:
    """Checks the lengths and makes the core's order. `deadline_seconds` is 0 for none. Raises Refusal."""
    stop, sampling = checked.stop, checked.sampling
    max_new_tokens = _max_new_tokens(stop, len(token_ids), model)
    if stop.min_new_tokens > max_new_tokens:
        _refuse("stop.min_new_tokens", stop.min_new_tokens, f"max_new_tokens, here {max_new_tokens}")
    return frontend_pb2.Submit(
        stream=stream,
        request_id=checked.request_id,
        prompt=np.asarray(token_ids, dtype="<i4").tobytes(),
        max_new_tokens=max_new_tokens,
        min_new_tokens=stop.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=np.asarray(list(dict.fromkeys(stop.stop_token_ids)), dtype="<i4").tobytes(),
        ignore_eos=stop.ignore_eos,
        priority=checked.priority,
        max_time_seconds=stop.max_time_seconds,
        deadline_seconds=deadline_seconds,
    )


def check_request_id(field: str, request_id: str) -> None:
    """At most 128 characters, all of them printable."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        _refuse(field, f"{len(request_id)} characters long", MAX_REQUEST_ID_CHARS)
    if not request_id.isprintable():
        idx = next(i for i, char in enumerate(request_id) if not char.isprintable())
        code = f"U+{ord(request_id[idx]):04X}"
        raise status.invalid(field, f"{field} has {code} at character {idx}; only printable ones are allowed")


def _check_request_id(request_id: str) -> str:
    check_request_id("request_id", request_id)
    return request_id or uuid.uuid4().hex


def _effective_sampling(asked: inference_pb2.SamplingParams, model: Model) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams()
    sampling.CopyFrom(model.defaults)
    sampling.MergeFrom(asked)
    if not asked.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    _check_range("sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_above_zero("sampling.top_p", sampling.top_p, 1)
    _check_range("sampling.top_k", sampling.top_k, 0, max(model.info.vocab_size, model.defaults.top_k))
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    return sampling


def _check_stop(stop: inference_pb2.StopParams, model: Model) -> tuple[str, ...]:
    # How many at most depends on the prompt, whose length is not known yet: `make_submit` says the one limit.
    if stop.HasField("max_new_tokens") and stop.max_new_tokens == 0:
        raise status.invalid("stop.max_new_tokens", "stop.max_new_tokens is 0; it must be at least 1")
    if stop.HasField("max_time_seconds"):
        _check_above_zero("stop.max_time_seconds", stop.max_time_seconds, MAX_TIME_SECONDS)
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        _refuse("stop.stop_token_ids", f"{len(stop.stop_token_ids)} long", MAX_STOP_TOKEN_IDS)
    if stop.stop_token_ids:
        check_token_ids("stop.stop_token_ids", stop.stop_token_ids, model)
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        _refuse("stop.stop_strings", f"{len(stop.stop_strings)} long", MAX_STOP_STRINGS)
    for idx, string in enumerate(stop.stop_strings):
        field = f"stop.stop_strings[{idx}]"
        if not string:
            raise status.invalid(field, f"{field} is empty; at least 1 character is needed")
        if len(string) > MAX_STOP_STRING_CHARS:
            _refuse(field, f"{len(string)} characters long", MAX_STOP_STRING_CHARS)
    if stop.stop_strings and model.text is None:
        message = "stop.stop_strings needs a tokenizer, and the served model came without one"
        raise status.invalid("stop.stop_strings", message)
    return tuple(dict.fromkeys(stop.stop_strings))


def _check_want_text(output: inference_pb2.OutputParams, model: Model) -> bool:
    if model.text is None and output.want_text:
        message = "output.want_text is true, and the served model came without a tokenizer"
        raise status.invalid("output.want_text", message)
    return model.text is not None and (not output.HasField("want_text") or output.want_text)


def _max_new_tokens(stop: inference_pb2.StopParams, num_prompt: int, model: Model) -> int:
    max_length = model.info.max_length
    num_left = max_length - num_prompt
    if num_left < 1:
        message = (
            f"prompt has {num_prompt} tokens; the limit is {max_length - 1}"
            f" (max_length {max_length}, less one new token)"
        )
        raise status.invalid("prompt", message)
    if not stop.HasField("max_new_tokens"):
        return max(1, min(model.info.default_max_new_tokens, num_left))
    if stop.max_new_tokens > num_left:
        why = f"{num_left} (max_length {max_length}, less {num_prompt} prompt tokens)"
        _refuse("stop.max_new_tokens", stop.max_new_tokens, why)
    return stop.max_new_tokens


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise status.invalid(field, f"{field} is {value}; it must be between {low} and {high}")


def _check_above_zero(field: str, value: float, high: float) -> None:
    # Not (0 < nan).
    if not 0 < value <= high:
        raise status.invalid(field, f"{field} is {value}; it must be above 0, and at most {high}")


def _refuse(field: str, number: object, limit: object) -> None:
    raise status.invalid(field, f"{field} is {number}; the limit is {limit}")


def check_detokenize(request: inference_pb2.DetokenizeRequest, model: Model) -> Text:
    """The tokenizer for a request that it can answer. Raises Refusal."""
    if model.text is None:
        raise status.invalid("token_ids", "token_ids need a tokenizer, and the served model came without one")
    if len(request.token_ids) > model.info.max_length:
        _refuse("token_ids", f"{len(request.token_ids)} long", model.info.max_length)
    check_token_ids("token_ids", request.token_ids, model)
    return model.text
