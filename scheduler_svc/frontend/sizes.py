"""Owns the numbers that bound what a caller may send, the limit of every field by its path, and what a refusal says.

A limit is a number or the name of one of `Sizes`. `checked_by` names the function below `scheduler_svc.frontend` that
checks the parsed field. Lists, strings and bytes are also bounded by `scan.py` before the message is parsed. What a
request may set of sampling is in `sampling_limits.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from tandem.v1 import control_pb2

from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.core.messages.names import MAX_TENANT_CHARS, PREFIXES
from scheduler_svc.core.messages.operators import (
    MAX_FOLDER_CHARS,
    MAX_OPERATION_SECONDS,
    MAX_PAGE_SIZE,
    MAX_VERSION_CHARS,
    MAX_WORKER_NAME_CHARS,
)
from scheduler_svc.door.tenant import MAX_PRIORITY, CallerLimits
from scheduler_svc.frontend import sampling_limits
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.options import MAX_METADATA_BYTES

MAX_REQUEST_ID_CHARS = 128
# Of an id that names a request: in the longest form that `core/messages/names` knows, `tenant/chatcmpl-id`.
MAX_NAMED_ID_CHARS = MAX_TENANT_CHARS + 1 + max(map(len, PREFIXES)) + MAX_REQUEST_ID_CHARS
# A model's name may be the path of its folder.
MAX_MODEL_NAME_CHARS = 4096
MAX_SALT_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
# The largest int32, with which callers ask for all that fits.
MAX_NEW_TOKENS = 2**31 - 1
# One week.
MAX_TIME_SECONDS = 604_800
MAX_QUEUE_SECONDS = 86_400
MAX_BIAS = 100
# Of each list: biased, allowed, banned.
MAX_LISTED_TOKENS = 4096
MAX_LINGER_SECONDS = 600
# A secret has 32 bytes. A wrong one has the answer of an unknown request.
MAX_SECRET_BYTES = 1024
MAX_CHAT_MESSAGES = 1024
MAX_CHAT_TOOLS = 128
# Names of arguments of a template.
MAX_CHAT_ARGS = 64
# Of all messages together.
MAX_CHAT_PARTS = 4096
MAX_CHAT_CALLS = 1024
MAX_TOOL_NAME_CHARS = 128
MAX_ABORT_IDS = 1024
# With room for tags and lengths.
MAX_ABORT_BYTES = MAX_ABORT_IDS * (4 + 4 * MAX_NAMED_ID_CHARS)
# Of a constraint, in bytes, and of its list of choices.
MAX_CONSTRAINT_BYTES = 65_536
MAX_CHOICES = 1_024
MAX_CHOICE_CHARS = 4_096
# Of ListRequests.
MAX_PAGE_TOKEN_CHARS = 64
MAX_STATES = 8
MAX_QUARANTINE_KEYS = 16
QUARANTINE_KEY_CHARS = 64
MAX_SERVICE_NAME_CHARS = 200
# The most bytes of a character in UTF-8.
MAX_CHAR_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What follows from the served model. Without a model nothing is allowed."""

    prompt_tokens: int = 0
    text_chars: int = 0
    """Of a text that may fit the longest sequence; 0 without a tokenizer."""
    length: int = 0
    """Tokens of the longest sequence."""
    vocabulary: int = 0
    samples: int = 0
    """Of one request."""
    logprobs: int = 0
    """Alternatives beside each token."""


def wrong(field: str, what: str) -> status.Refusal:
    """The refusal of a field's value (INVALID_ARGUMENT). Its message begins with the field."""
    return status.invalid(field, f"{field} {what}")


def refuse(field: str, what: str, limit: object) -> NoReturn:
    """Raises the refusal of what is beyond a limit."""
    raise wrong(field, f"{what}; the limit is {limit}")


def check_count(field: str, count: int, limit: int, unit: str = "long") -> None:
    """Refuses a list with more than `limit` entries, or a text with more than `limit` of a unit."""
    if count > limit:
        refuse(field, f"is {count} {unit}", limit)


class Of(StrEnum):
    """What a limit counts."""

    ENTRIES = "entries"
    CHARACTERS = "characters"
    BYTES = "bytes"
    VALUE = "value"
    # A flag, or a message whose fields have limits of their own.
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit of one field. `each_bytes` bounds an entry of a list of strings, messages or of a map.

    The name of one of `Sizes` there stands for that number of characters. It is 0 for messages whose fields have limits
    of their own; then the entries of a list in them count together, over all messages.
    A value is at least `least`, or above it if `is_above`.
    """

    of: Of
    most: float | str = 0
    least: float = 0
    is_above: bool = False
    each_bytes: int | str = 0
    checked_by: str = ""


def _entries(most: int | str, checked_by: str, *, each_bytes: int | str = 0) -> Limit:
    return Limit(of=Of.ENTRIES, most=most, each_bytes=each_bytes, checked_by=checked_by)


def _characters(most: int | str, checked_by: str) -> Limit:
    return Limit(of=Of.CHARACTERS, most=most, checked_by=checked_by)


def _value(least: float, most: float | str, checked_by: str, *, is_above: bool = False) -> Limit:
    return Limit(of=Of.VALUE, least=least, most=most, is_above=is_above, checked_by=checked_by)


def _numbers_of_sampling() -> dict[str, Limit]:
    return {
        f"sampling.{name}": _value(of.low, of.high, _SAMPLING, is_above=of.above_low)
        for name, of in sampling_limits.LIMITS.items()
    }


_INSIDE = _FLAG = Limit(of=Of.NOTHING)
_REQUEST, _CHECKS = "validate.check_request", "validate.check_request_id"
_SAMPLING, _RESUME = "validate.check_sampling", "validate.check_resume"
_CHAT = "chat.conversation.check_size"
_GRAMMAR = "constraints.grammar.grammar_of"
_CONSTRAINT = _characters(MAX_CONSTRAINT_BYTES, _GRAMMAR)
_OPERATION = "control.check_operation"
_LIST = "listing.check_list"
_NAME = _characters(MAX_MODEL_NAME_CHARS, "model.Model.check_name")
_TEXT = _characters("text_chars", "text.tokenizer.Tokenizer.check_size")
# Two fields of at most 6 bytes each, with their tags; an entry of a map the same.
_PAIR_BYTES = 32
# Five such fields.
_OFFSET_BYTES = 64


def _chat(path: str) -> dict[str, Limit]:
    """The limits of a chat and of the fields inside, whose text together is at most `text_chars`."""
    text = _characters("text_chars", _CHAT)
    call = {"id": text, "name": text, "arguments_json": text}
    message = {
        # All roles are short; the check names them.
        "role": text,
        "content": _entries(MAX_CHAT_PARTS, _CHAT, each_bytes="text_chars"),
        "reasoning": text,
        "tool_calls": _entries(MAX_CHAT_CALLS, _CHAT),
        **{f"tool_calls.{name}": limit for name, limit in call.items()},
        "tool_call_id": text,
        "name": text,
    }
    inside = {
        "messages": _entries(MAX_CHAT_MESSAGES, _CHAT),
        **{f"messages.{name}": limit for name, limit in message.items()},
        "tools_json": _entries(MAX_CHAT_TOOLS, _CHAT, each_bytes="text_chars"),
        "tool_choice": _INSIDE,
        # An enum, whose numbers `choose` checks.
        "tool_choice.mode": _FLAG,
        "tool_choice.name": _characters(MAX_TOOL_NAME_CHARS, "chat.conversation.choose"),
        "parallel_tool_calls": _FLAG,
        "template_args_json": text,
        "continue_final_message": _FLAG,
        "add_generation_prompt": _FLAG,
        "unparsed": _FLAG,
    }
    return {path: _INSIDE, **{f"{path}.{name}": limit for name, limit in inside.items()}}


# By the full name of the request, then by path. Messages of lists without paths inside are bounded by `each_bytes`.
LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "tandem.v1.GenerateRequest": {
        "request_id": _characters(MAX_REQUEST_ID_CHARS, _CHECKS),
        "model": _NAME,
        "text": _TEXT,
        "token_ids": _INSIDE,
        "token_ids.ids": _entries("prompt_tokens", "validate.make_submit"),
        "add_special_tokens": _FLAG,
        **_chat("chat"),
        "sampling": _INSIDE,
        **_numbers_of_sampling(),
        "sampling.top_k": _value(0, "vocabulary", _SAMPLING),
        # Every number is a seed.
        "sampling.seed": _FLAG,
        "sampling.num_samples": _value(1, "samples", _SAMPLING),
        "sampling.logit_bias": _entries(MAX_LISTED_TOKENS, _SAMPLING, each_bytes=_PAIR_BYTES),
        "sampling.allowed_token_ids": _INSIDE,
        "sampling.allowed_token_ids.ids": _entries(MAX_LISTED_TOKENS, _SAMPLING),
        "sampling.banned_token_ids": _entries(MAX_LISTED_TOKENS, _SAMPLING),
        "stop": _INSIDE,
        # More than the model's length means the model's length. A tenant may have a limit of its own.
        "stop.max_new_tokens": _value(1, MAX_NEW_TOKENS, _REQUEST),
        "stop.min_new_tokens": _value(0, "length", "validate.make_submit"),
        "stop.stop_strings": _entries(MAX_STOP_STRINGS, _REQUEST, each_bytes=MAX_CHAR_BYTES * MAX_STOP_STRING_CHARS),
        "stop.stop_token_ids": _entries(MAX_STOP_TOKEN_IDS, _REQUEST),
        "stop.ignore_eos": _FLAG,
        "stop.include_stop": _FLAG,
        "stop.max_time_seconds": _value(0, MAX_TIME_SECONDS, _REQUEST, is_above=True),
        "output": _INSIDE,
        "output.want_text": _FLAG,
        "output.want_token_ids": _FLAG,
        "output.skip_special_tokens": _FLAG,
        "output.logprobs": _value(0, "logprobs", _REQUEST),
        "output.logprob_pieces": _FLAG,
        "output.prompt_logprobs_start": _value(0, "prompt_tokens", "validate.make_submit"),
        # A tenant may have a smaller range.
        "priority": _value(-MAX_PRIORITY, MAX_PRIORITY, _REQUEST),
        "cache": _INSIDE,
        "cache.salt": _characters(MAX_SALT_CHARS, _REQUEST),
        "cache.bypass_read": _FLAG,
        "cache.bypass_write": _FLAG,
        "max_queue_seconds": _value(0, MAX_QUEUE_SECONDS, _REQUEST),
        "constraint": _INSIDE,
        "constraint.json_schema": _CONSTRAINT,
        "constraint.json_object": _INSIDE,
        "constraint.regex": _CONSTRAINT,
        "constraint.choices": _INSIDE,
        "constraint.choices.choices": _entries(MAX_CHOICES, _GRAMMAR, each_bytes=MAX_CHAR_BYTES * MAX_CHOICE_CHARS),
        "constraint.lark": _CONSTRAINT,
        "resume": _INSIDE,
        "resume.linger_seconds": _value(0, MAX_LINGER_SECONDS, "validate.check_linger"),
    },
    "tandem.v1.ResumeRequest": {
        "request_id": _characters(MAX_NAMED_ID_CHARS, _CHECKS),
        "resume_secret": Limit(of=Of.BYTES, most=MAX_SECRET_BYTES, checked_by=_RESUME),
        "offsets": _entries(MAX_NUM_SAMPLES, _RESUME, each_bytes=_OFFSET_BYTES),
    },
    "tandem.v1.TokenizeRequest": {"model": _NAME, "text": _TEXT, "add_special_tokens": _FLAG},
    "tandem.v1.DetokenizeRequest": {
        "model": _NAME,
        "token_ids": _entries("length", "validate.check_detokenize"),
        "skip_special_tokens": _FLAG,
        "separately": _FLAG,
    },
    "tandem.v1.RenderChatRequest": {"model": _NAME, **_chat("chat")},
    "tandem.v1.AbortRequest": {
        "request_ids": _entries(
            MAX_ABORT_IDS,
            "control.ControlServicer.Abort",
            each_bytes=MAX_CHAR_BYTES * MAX_NAMED_ID_CHARS,
        )
    },
    "tandem.v1.ListRequestsRequest": {
        "page_size": _value(0, MAX_PAGE_SIZE, _LIST),
        "page_token": _characters(MAX_PAGE_TOKEN_CHARS, _LIST),
        "tenant": _characters(MAX_TENANT_CHARS, _LIST),
        # Enums, whose numbers `_LIST` checks.
        "states": _entries(MAX_STATES, _LIST),
        "id_prefix": _characters(MAX_NAMED_ID_CHARS, _LIST),
    },
    "tandem.v1.GetCallerRequest": {},
    "tandem.v1.GetModelInfoRequest": {},
    "tandem.v1.GetLoadRequest": {},
    "tandem.v1.FlushCacheRequest": {},
    "tandem.v1.ListQuarantineRequest": {},
    "tandem.v1.ClearQuarantineRequest": {
        "keys": _entries(
            MAX_QUARANTINE_KEYS,
            "control.ControlServicer.ClearQuarantine",
            each_bytes=MAX_CHAR_BYTES * QUARANTINE_KEY_CHARS,
        )
    },
    "tandem.v1.DrainRequest": {
        "worker": _characters(MAX_WORKER_NAME_CHARS, _OPERATION),
        "max_seconds": _value(0, MAX_OPERATION_SECONDS, _OPERATION),
        "force": _FLAG,
    },
    "tandem.v1.UpdateWeightsRequest": {
        "version": _characters(MAX_VERSION_CHARS, _OPERATION),
        "folder": _characters(MAX_FOLDER_CHARS, _OPERATION),
        # An enum, whose numbers `_OPERATION` checks.
        "running": _FLAG,
        "in_turn": _FLAG,
        "max_seconds": _value(0, MAX_OPERATION_SECONDS, _OPERATION),
    },
    "grpc.health.v1.HealthCheckRequest": {
        "service": _characters(MAX_SERVICE_NAME_CHARS, "readiness.check_name"),
    },
    "grpc.health.v1.HealthListRequest": {},
}


def told(sizes: Sizes, caller: CallerLimits, *, max_message_bytes: int) -> control_pb2.RequestLimits:
    """Returns the limits of a caller's requests to the served model."""
    return control_pb2.RequestLimits(
        max_message_bytes=max_message_bytes,
        max_metadata_bytes=MAX_METADATA_BYTES,
        max_prompt_tokens=sizes.prompt_tokens,
        max_text_chars=sizes.text_chars,
        max_new_tokens=caller.max_new_tokens,
        min_priority=caller.min_priority,
        max_priority=caller.max_priority,
        max_request_id_chars=MAX_REQUEST_ID_CHARS,
        max_salt_chars=MAX_SALT_CHARS,
        max_stop_strings=MAX_STOP_STRINGS,
        max_stop_string_chars=MAX_STOP_STRING_CHARS,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        max_listed_tokens=MAX_LISTED_TOKENS,
        max_time_seconds=MAX_TIME_SECONDS,
        max_queue_seconds=MAX_QUEUE_SECONDS,
        max_linger_seconds=MAX_LINGER_SECONDS,
        max_abort_ids=MAX_ABORT_IDS,
        max_constraint_bytes=MAX_CONSTRAINT_BYTES,
        max_chat_messages=MAX_CHAT_MESSAGES,
        max_chat_tools=MAX_CHAT_TOOLS,
    )
