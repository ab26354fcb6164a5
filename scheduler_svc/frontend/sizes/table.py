"""Owns the limit of every field of every request, by its path from the request.

A limit is a number or the name of one of `Sizes`. `checked_by` names the function below `scheduler_svc.frontend` that
checks the parsed field. Lists, strings and bytes are also bounded by `scan.py` before the message is parsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tandem.v1 import control_pb2

from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.door.tenant import MAX_PRIORITY, CallerLimits
from scheduler_svc.frontend import sampling_limits
from scheduler_svc.frontend.rpc.options import MAX_METADATA_BYTES
from scheduler_svc.frontend.sizes import limits as n


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


def _sampling(name: str) -> Limit:
    of = sampling_limits.LIMITS[name]
    return _value(of.low, of.high, _SAMPLING, is_above=of.above_low)


_INSIDE = _FLAG = Limit(of=Of.NOTHING)
_REQUEST, _CHECKS = "validate.request.check_request", "validate.checks.check_request_id"
_SAMPLING, _RESUME = "validate.sampling.check_sampling", "validate.request.check_resume"
_CHAT = "chat.conversation.check_size"
_GRAMMAR = "constraints.grammar.grammar_of"
_CONSTRAINT = _characters(n.MAX_CONSTRAINT_BYTES, _GRAMMAR)
_UPDATE = "control.check_update"
_NAME = _characters(n.MAX_MODEL_NAME_CHARS, "model.Model.check_name")
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
        "content": _entries(n.MAX_CHAT_PARTS, _CHAT, each_bytes="text_chars"),
        "reasoning": text,
        "tool_calls": _entries(n.MAX_CHAT_CALLS, _CHAT),
        **{f"tool_calls.{name}": limit for name, limit in call.items()},
        "tool_call_id": text,
        "name": text,
    }
    inside = {
        "messages": _entries(n.MAX_CHAT_MESSAGES, _CHAT),
        **{f"messages.{name}": limit for name, limit in message.items()},
        "tools_json": _entries(n.MAX_CHAT_TOOLS, _CHAT, each_bytes="text_chars"),
        "tool_choice": _INSIDE,
        # An enum, whose numbers `choose` checks.
        "tool_choice.mode": _FLAG,
        "tool_choice.name": _characters(n.MAX_TOOL_NAME_CHARS, "tools.tool.choose"),
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
        "request_id": _characters(n.MAX_REQUEST_ID_CHARS, _CHECKS),
        "model": _NAME,
        "text": _TEXT,
        "token_ids": _INSIDE,
        "token_ids.ids": _entries("prompt_tokens", "validate.request.make_submit"),
        "add_special_tokens": _FLAG,
        **_chat("chat"),
        "sampling": _INSIDE,
        "sampling.temperature": _sampling("temperature"),
        "sampling.top_p": _sampling("top_p"),
        "sampling.top_k": _value(0, "vocabulary", _SAMPLING),
        "sampling.min_p": _sampling("min_p"),
        # Every number is a seed.
        "sampling.seed": _FLAG,
        "sampling.presence_penalty": _sampling("presence_penalty"),
        "sampling.frequency_penalty": _sampling("frequency_penalty"),
        "sampling.repetition_penalty": _sampling("repetition_penalty"),
        "sampling.num_samples": _value(1, "samples", _SAMPLING),
        "sampling.logit_bias": _entries(n.MAX_LISTED_TOKENS, _SAMPLING, each_bytes=_PAIR_BYTES),
        "sampling.allowed_token_ids": _INSIDE,
        "sampling.allowed_token_ids.ids": _entries(n.MAX_LISTED_TOKENS, _SAMPLING),
        "sampling.banned_token_ids": _entries(n.MAX_LISTED_TOKENS, _SAMPLING),
        "sampling.typical_p": _sampling("typical_p"),
        "stop": _INSIDE,
        # More than the model's length means the model's length. A tenant may have a limit of its own.
        "stop.max_new_tokens": _value(1, n.MAX_NEW_TOKENS, _REQUEST),
        "stop.min_new_tokens": _value(0, "length", "validate.request.make_submit"),
        "stop.stop_strings": _entries(
            n.MAX_STOP_STRINGS, _REQUEST, each_bytes=n.MAX_CHAR_BYTES * n.MAX_STOP_STRING_CHARS
        ),
        "stop.stop_token_ids": _entries(n.MAX_STOP_TOKEN_IDS, _REQUEST),
        "stop.ignore_eos": _FLAG,
        "stop.include_stop": _FLAG,
        "stop.max_time_seconds": _value(0, n.MAX_TIME_SECONDS, _REQUEST, is_above=True),
        "output": _INSIDE,
        "output.want_text": _FLAG,
        "output.want_token_ids": _FLAG,
        "output.skip_special_tokens": _FLAG,
        "output.logprobs": _value(0, "logprobs", _REQUEST),
        "output.logprob_pieces": _FLAG,
        "output.prompt_logprobs_start": _value(0, "prompt_tokens", "validate.request.make_submit"),
        # A tenant may have a smaller range.
        "priority": _value(-MAX_PRIORITY, MAX_PRIORITY, _REQUEST),
        "cache": _INSIDE,
        "cache.salt": _characters(n.MAX_SALT_CHARS, _REQUEST),
        "cache.bypass_read": _FLAG,
        "cache.bypass_write": _FLAG,
        "max_queue_seconds": _value(0, n.MAX_QUEUE_SECONDS, _REQUEST),
        "constraint": _INSIDE,
        "constraint.json_schema": _CONSTRAINT,
        "constraint.json_object": _INSIDE,
        "constraint.regex": _CONSTRAINT,
        "constraint.choices": _INSIDE,
        "constraint.choices.choices": _entries(
            n.MAX_CHOICES, _GRAMMAR, each_bytes=n.MAX_CHAR_BYTES * n.MAX_CHOICE_CHARS
        ),
        "constraint.lark": _CONSTRAINT,
        "resume": _INSIDE,
        "resume.linger_seconds": _value(0, n.MAX_LINGER_SECONDS, "validate.request.check_linger"),
    },
    "tandem.v1.ResumeRequest": {
        "request_id": _characters(n.MAX_REQUEST_ID_CHARS, _CHECKS),
        "resume_secret": Limit(of=Of.BYTES, most=n.MAX_SECRET_BYTES, checked_by=_RESUME),
        "offsets": _entries(MAX_NUM_SAMPLES, _RESUME, each_bytes=_OFFSET_BYTES),
    },
    "tandem.v1.TokenizeRequest": {"model": _NAME, "text": _TEXT, "add_special_tokens": _FLAG},
    "tandem.v1.DetokenizeRequest": {
        "model": _NAME,
        "token_ids": _entries("length", "validate.request.check_detokenize"),
        "skip_special_tokens": _FLAG,
        "separately": _FLAG,
    },
    "tandem.v1.RenderChatRequest": {"model": _NAME, **_chat("chat")},
    "tandem.v1.AbortRequest": {
        "request_ids": _entries(
            n.MAX_ABORT_IDS,
            "control.ControlServicer.Abort",
            # As `tenant/id`.
            each_bytes=n.MAX_CHAR_BYTES * n.MAX_REQUEST_ID_CHARS,
        )
    },
    "tandem.v1.GetCallerRequest": {},
    "tandem.v1.GetModelInfoRequest": {},
    "tandem.v1.GetLoadRequest": {},
    "tandem.v1.FlushCacheRequest": {},
    "tandem.v1.ListQuarantineRequest": {},
    "tandem.v1.ClearQuarantineRequest": {
        "keys": _entries(
            n.MAX_QUARANTINE_KEYS,
            "control.ControlServicer.ClearQuarantine",
            each_bytes=n.MAX_CHAR_BYTES * n.QUARANTINE_KEY_CHARS,
        )
    },
    "tandem.v1.DrainRequest": {
        "worker": _characters(n.MAX_WORKER_NAME_CHARS, "control.check_drain"),
        "max_seconds": _value(0, n.MAX_DRAIN_SECONDS, "control.check_drain"),
        "force": _FLAG,
    },
    "tandem.v1.UpdateWeightsRequest": {
        "version": _characters(n.MAX_VERSION_CHARS, _UPDATE),
        "folder": _characters(n.MAX_FOLDER_CHARS, _UPDATE),
        # An enum, whose numbers `_UPDATE` checks.
        "running": _FLAG,
        "in_turn": _FLAG,
        "max_seconds": _value(0, n.MAX_UPDATE_SECONDS, _UPDATE),
    },
    "grpc.health.v1.HealthCheckRequest": {
        "service": _characters(n.MAX_SERVICE_NAME_CHARS, "readiness.check_name"),
    },
    "grpc.health.v1.HealthListRequest": {},
}


def told(sizes: n.Sizes, caller: CallerLimits, *, max_message_bytes: int) -> control_pb2.RequestLimits:
    """Returns the limits of a caller's requests to the served model."""
    return control_pb2.RequestLimits(
        max_message_bytes=max_message_bytes,
        max_metadata_bytes=MAX_METADATA_BYTES,
        max_prompt_tokens=sizes.prompt_tokens,
        max_text_chars=sizes.text_chars,
        max_new_tokens=caller.max_new_tokens,
        min_priority=caller.min_priority,
        max_priority=caller.max_priority,
        max_request_id_chars=n.MAX_REQUEST_ID_CHARS,
        max_salt_chars=n.MAX_SALT_CHARS,
        max_stop_strings=n.MAX_STOP_STRINGS,
        max_stop_string_chars=n.MAX_STOP_STRING_CHARS,
        max_stop_token_ids=n.MAX_STOP_TOKEN_IDS,
        max_listed_tokens=n.MAX_LISTED_TOKENS,
        max_time_seconds=n.MAX_TIME_SECONDS,
        max_queue_seconds=n.MAX_QUEUE_SECONDS,
        max_linger_seconds=n.MAX_LINGER_SECONDS,
        max_abort_ids=n.MAX_ABORT_IDS,
        max_constraint_bytes=n.MAX_CONSTRAINT_BYTES,
        max_chat_messages=n.MAX_CHAT_MESSAGES,
        max_chat_tools=n.MAX_CHAT_TOOLS,
    )
