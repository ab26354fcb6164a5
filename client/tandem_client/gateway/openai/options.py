"""The options that completions and chats share: sampling, stops, logprobs, streams, cache, constraint.

Owns their translation to a GenerateRequest. The service checks values; only what a message cannot hold is refused here.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from tandem.v1 import inference_pb2

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.openai.constraint import set_constraint
from tandem_client.gateway.openai.fields import Fields, integer_of, text_of, wrong

_SAMPLING = (
    "temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_INT32 = 2**31
_INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Whether the answer is a stream, and which of its chunks have usage."""

    is_stream: bool
    at_end: bool
    in_each: bool


def set_options(fields: Fields, request: inference_pb2.GenerateRequest, names: dict[str, str]) -> None:
    """Sets the shared options of a request. `names` learns which fields set the constraint and the salt."""
    if (model := fields.text("model")) is not None:
        request.model = model
    for name in _SAMPLING:
        if (number := fields.number(name)) is not None:
            setattr(request.sampling, name, number)
    # vLLM's "all tokens" is -1.
    if (top_k := fields.integer("top_k", low=-1)) is not None:
        request.sampling.top_k = max(0, top_k)
    if (seed := fields.integer("seed", low=-_INT64, high=2 * _INT64 - 1)) is not None:
        request.sampling.seed = seed % (2 * _INT64)
    if (n := fields.integer("n", low=1)) is not None:
        request.sampling.num_samples = n
    _set_bias(fields, request)
    if (ids := fields.items("allowed_token_ids")) is not None:
        request.sampling.allowed_token_ids.SetInParent()
        request.sampling.allowed_token_ids.ids.extend(_ids(ids, "allowed_token_ids"))
    _set_stops(fields, request)
    if (skip := fields.flag("skip_special_tokens")) is not None:
        request.output.skip_special_tokens = skip
    if (priority := fields.integer("priority", low=-_INT32, high=_INT32 - 1)) is not None:
        request.priority = priority
    _set_salt(fields, request, names)
    set_constraint(fields, request, names)


def streaming(fields: Fields) -> Streaming:
    """Reads `stream` and `stream_options`."""
    is_stream = fields.flag("stream") or False
    options = fields.inner("stream_options")
    if options is None:
        return Streaming(is_stream=is_stream, at_end=False, in_each=False)
    if not is_stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    options.drop("include_obfuscation")
    at_end, in_each = options.flag("include_usage") or False, options.flag("continuous_usage_stats") or False
    options.end()
    return Streaming(is_stream=True, at_end=at_end, in_each=in_each)


def _set_bias(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    bias: object = fields.any("logit_bias")
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise wrong("logit_bias", bias, "an object from token ids to numbers")
    for key, value in cast(dict[str, object], bias).items():
        name = f"logit_bias[{key[:20]}]"
        # Ids are strings in JSON. isdecimal is also true of digits of other scripts.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid(name, f"{name} is no token id; it must be a whole number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, value, "a number")
        try:
            request.sampling.logit_bias[integer_of(int(key), name)] = float(value)
        except OverflowError:
            raise wrong(name, value, "a number from -100 to 100") from None


def _set_stops(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    stop = fields.any("stop")
    if isinstance(stop, list):
        strings = cast(list[object], stop)
        request.stop.stop_strings.extend(text_of(each, f"stop[{i}]") for i, each in enumerate(strings))
    elif stop is not None:
        request.stop.stop_strings.append(text_of(stop, "stop"))
    if (ids := fields.items("stop_token_ids")) is not None:
        request.stop.stop_token_ids.extend(_ids(ids, "stop_token_ids"))
    if (least := fields.integer("min_tokens")) is not None:
        request.stop.min_new_tokens = least
    request.stop.ignore_eos = fields.flag("ignore_eos") or False
    request.stop.include_stop = fields.flag("include_stop_str_in_output") or False


def _set_salt(fields: Fields, request: inference_pb2.GenerateRequest, names: dict[str, str]) -> None:
    """A user has pages of its own, inside those of the caller's tenant: the service adds the tenant to every salt."""
    salt, user = fields.text("cache_salt"), fields.text("user")
    if user is None:
        request.cache.salt = salt or ""
        return
    # A user may be longer than a salt, and must not be able to take another's: so both are hashed.
    hashed = hashlib.sha256(json.dumps([user, salt]).encode()).hexdigest()
    request.cache.salt = f"user-{hashed}"
    names["cache.salt"] = "user"


def _ids(values: Iterable[object], name: str) -> Iterable[int]:
    return (integer_of(value, f"{name}[{i}]") for i, value in enumerate(values))


def token_ids(values: list[object], name: str) -> list[int]:
    """Returns a list of token ids, quickly for long ones."""
    plain = cast(list[Any], values)
    # `type`, because true is an int too.
    if all(type(value) is int for value in plain) and min(plain, default=0) >= 0 and max(plain, default=0) < 2**32:
        return plain
    return list(_ids(values, name))
