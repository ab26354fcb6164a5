"""Owns the limit of every field of every request, by its path from the request.

A limit is a number or the name of one of `Sizes`. `checked_by` names the function below `scheduler_svc.frontend` that
checks the parsed field. Lists, strings and bytes are also bounded by `scan.py` before the message is parsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.door.tenant import MAX_PRIORITY
from scheduler_svc.frontend import sampling_limits
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

    A value is at least `least`, or above it if `is_above`.
    """

    of: Of
    most: float | str = 0
    least: float = 0
    is_above: bool = False
    each_bytes: int = 0
    checked_by: str = ""


def _entries(most: int | str, checked_by: str, *, each_bytes: int = 0) -> Limit:
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
_SAMPLING, _RESUME = "validate.sampling.check_sampling", "validate.resume.check_resume"
_UPDATE = "watches.weights.check_update"
_NAME = _characters(n.MAX_MODEL_NAME_CHARS, "model.Model.check_name")
_TEXT = _characters("text_chars", "text.tokenizer.Tokenizer.check_size")
# Two fields of at most 6 bytes each, with their tags; an entry of a map the same.
_PAIR_BYTES = 32

# By the full name of the request, then by path. Messages of lists have no paths inside: `each_bytes` bounds them.
LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "tandem.v1.GenerateRequest": {
        "request_id": _characters(n.MAX_REQUEST_ID_CHARS, _CHECKS),
        "model": _NAME,
        "text": _TEXT,
        "token_ids": _INSIDE,
        "token_ids.ids": _entries("prompt_tokens", "validate.request.make_submit"),
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
        "output.prompt_logprobs_start": _value(0, "prompt_tokens", "validate.request.make_submit"),
        # A tenant may have a smaller range.
        "priority": _value(-MAX_PRIORITY, MAX_PRIORITY, _REQUEST),
        "cache": _INSIDE,
        "cache.salt": _characters(n.MAX_SALT_CHARS, _REQUEST),
        "cache.bypass_read": _FLAG,
        "cache.bypass_write": _FLAG,
        "max_queue_seconds": _value(0, n.MAX_QUEUE_SECONDS, _REQUEST),
        "resume": _INSIDE,
        "resume.linger_seconds": _value(0, n.MAX_LINGER_SECONDS, "validate.resume.check_linger"),
    },
    "tandem.v1.ResumeRequest": {
        "request_id": _characters(n.MAX_REQUEST_ID_CHARS, _CHECKS),
        "resume_secret": Limit(of=Of.BYTES, most=n.MAX_SECRET_BYTES, checked_by=_RESUME),
        "offsets": _entries(MAX_NUM_SAMPLES, _RESUME, each_bytes=_PAIR_BYTES),
    },
    "tandem.v1.TokenizeRequest": {"model": _NAME, "text": _TEXT},
    "tandem.v1.DetokenizeRequest": {
        "model": _NAME,
        "token_ids": _entries("length", "validate.request.check_detokenize"),
        "skip_special_tokens": _FLAG,
        "separately": _FLAG,
    },
    "tandem.v1.AbortRequest": {
        "request_ids": _entries(
            n.MAX_ABORT_IDS,
            "control.ControlServicer.Abort",
            # As `tenant/id`.
            each_bytes=n.MAX_CHAR_BYTES * n.MAX_REQUEST_ID_CHARS,
        )
    },
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
        "worker": _characters(n.MAX_WORKER_NAME_CHARS, "watches.drains.check_drain"),
        "max_seconds": _value(0, n.MAX_DRAIN_SECONDS, "watches.drains.check_drain"),
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
        "service": _characters(n.MAX_SERVICE_NAME_CHARS, "health.check_name"),
    },
    "grpc.health.v1.HealthListRequest": {},
}
