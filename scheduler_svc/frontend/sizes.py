"""Owns the limits of every field of a request, read from the options in the protos, and what a refusal says.

`rules_of` makes a tree of a request's descriptor: the rule of each field. `scan.py` walks a message's bytes with it
before the message is parsed, `Check` walks the parsed message, and `limits_reply` is what callers read. What needs more
than one field is checked where it is known: in `validate.py` and `prompt.py`, and below `chat/` and `constraints/`.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import control_pb2, limits_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.door.tenant import CallerLimits
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.options import MAX_METADATA_BYTES
from tandem_contract.limits import limit_at, limit_of

# The most bytes of a character in UTF-8.
MAX_CHAR_BYTES = 4
# The size of a field that is a number: a tag of at most 5 bytes, and at most 10 of a varint.
MAX_NUMBER_BYTES = 16
_ABORT = limit_at(control_pb2.AbortRequest, "request_ids")
MAX_ABORT_IDS = _ABORT.entries
# With room for tags and lengths.
MAX_ABORT_BYTES = MAX_ABORT_IDS * (4 + MAX_CHAR_BYTES * _ABORT.chars)
MAX_LINGER_SECONDS = limit_at(pb.GenerateRequest, "resume.linger_seconds").most
_FLOAT = struct.Struct("f")
_VARINTS = (
    FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_ENUM,
)  # fmt: skip
# Limits of protos that are not ours.
_OTHERS = {"grpc.health.v1.HealthCheckRequest.service": limits_pb2.Limit(chars=200)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers of ModelLimit, which follow from the served model. Without a model nothing is allowed."""

    length: int = 0
    """Tokens of the longest sequence."""
    prompt_tokens: int = 0
    text_chars: int = 0
    """The longest text that may fit the longest sequence; 0 without a tokenizer."""
    top_k: int = 0
    samples: int = 0
    """The most samples of one request."""
    logprobs: int = 0
    """Alternatives beside each token."""

    def number(self, limit: "Number") -> Any:
        return getattr(self, limit) if isinstance(limit, str) else limit


NO_MODEL = Sizes()
# A limit: a number, or the name of one of Sizes. 0 or None: without a limit.
Number = int | float | str | None


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


def check_range(field: str, value: float, low: float, high: float, *, is_above: bool = False) -> None:
    """Refuses a value below `low`, above `high`, or NaN; with `is_above` also `low` itself."""
    # The comparisons are false for NaN.
    if low <= value <= high and not (is_above and value == low):
        return
    shown = value
    if not isinstance(value, int) and not value.is_integer():
        # 7 digits, as a float32 of 2.1 is 2.0999999046325684; in full if the short value is allowed.
        short = float(f"{value:.7g}")
        shown = value if low <= short <= high else short
    wanted = f"above {low:g}, and at most {high}" if is_above else f"between {low:.7g} and {high}"
    raise wrong(field, f"is {shown}; it must be {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule of the field at a path; a limit of None or 0 bounds nothing. A number is `least` to `most`.

    A list of messages that consist of numbers has no rules inside: `bytes` is the most of each of its entries.
    """

    path: str
    is_list: bool
    has_bytes: bool
    """Whether its values are texts, bytes or messages; the others are numbers."""
    entries: Number
    chars: Number
    bytes: int
    least: float
    is_above: bool
    """`least` itself is too small."""
    most: Number
    inside: "Rules | None"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a message's fields, by number."""

    name: str
    fields: Mapping[int, Rule]

    def walk(self) -> Iterator[Rule]:
        """Yields all rules, from the outside to the inside."""
        for rule in self.fields.values():
            yield rule
            if rule.inside is not None:
                yield from rule.inside.walk()


def rules_of(kind: Descriptor, path: str = "", entries: Number = None, chars: Number = None) -> Rules:
    """Returns the rules of a message and of all in it. `entries`, `chars`: those of the field that it stands in."""
    return Rules(kind.name, {field.number: _rule(field, path + field.name, entries, chars) for field in kind.fields})


def _rule(field: FieldDescriptor, path: str, entries: Number, chars: Number) -> Rule:
    limit, is_list = _OTHERS.get(field.full_name) or limit_of(field), field.is_repeated
    inside, enum = field.message_type, field.enum_type
    entries, chars = _number(limit, "of_entries", field) or entries, _number(limit, "of_chars", field) or chars
    assert entries is not None or not is_list, f"{path} has no limit of its entries"
    # The scan counts packed numbers as varints.
    assert _has_bytes(field) or not is_list or field.type in _VARINTS, path
    num_bytes = limit.bytes
    if is_list and inside is not None and not any(part.is_repeated or _has_bytes(part) for part in inside.fields):
        inside, num_bytes = None, MAX_NUMBER_BYTES * len(inside.fields)
    return Rule(
        path=path,
        is_list=is_list,
        has_bytes=_has_bytes(field),
        entries=entries if is_list else None,
        chars=chars if field.type == field.TYPE_STRING else None,
        bytes=num_bytes,
        least=_number(limit, "of_low", field) or 0,
        is_above=limit.HasField("above"),
        most=_number(limit, "of_high", field) if enum is None or is_list else enum.values[-1].number,
        inside=None if inside is None else rules_of(inside, f"{path}.", None if is_list else entries, chars),
    )


def _has_bytes(field: FieldDescriptor) -> bool:
    return field.type in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_MESSAGE)


def _number(
    limit: limits_pb2.Limit, part: Literal["of_entries", "of_chars", "of_low", "of_high"], field: FieldDescriptor
) -> Any:
    """One part of a limit, as a number of the field's type or the name of one of Sizes; None without one."""
    which = limit.WhichOneof(part)
    if which is None:
        return None
    number = getattr(limit, which)
    if which.endswith("_of"):
        return limits_pb2.ModelLimit.Name(number).removeprefix("MODEL_LIMIT_").lower()
    if field.type == field.TYPE_FLOAT:
        (number,) = _FLOAT.unpack(_FLOAT.pack(number))
    return int(number) if number == int(number) else number


class Check:
    """The walk over parsed messages of one kind that refuses the first field beyond its rule.

    Texts with a limit of the model are left to the code that counts them together, and knows why a model takes none.
    """

    def __init__(self, kind: type[Message], path: str = "", without: Collection[str] = ()) -> None:
        """`path`: of the message in its request, with a dot at its end. `without`: fields that others check."""
        rules = rules_of(cast(Descriptor, kind.DESCRIPTOR), path)
        fields = {number: rule for number, rule in rules.fields.items() if rule.path not in without}
        self._rules = Rules(rules.name, fields)

    def __call__(self, message: Message, sizes: Sizes = NO_MODEL) -> None:
        """Raises Refusal (INVALID_ARGUMENT)."""
        _check(self._rules, message, sizes)


def _check(rules: Rules, message: Message, sizes: Sizes) -> None:
    for field, value in message.ListFields():
        rule = rules.fields.get(field.number)
        if rule is None:
            continue
        if rule.is_list:
            _check_list(rule, value, sizes)
        elif rule.inside is not None:
            _check(rule.inside, value, sizes)
        elif rule.most is not None:
            check_range(rule.path, value, rule.least, sizes.number(rule.most), is_above=rule.is_above)
        elif rule.bytes:
            check_count(rule.path, len(value), rule.bytes, "bytes long")
        elif isinstance(rule.chars, int):
            check_count(rule.path, len(value), rule.chars, "characters long")


def _check_list(rule: Rule, value: Any, sizes: Sizes) -> None:
    check_count(rule.path, len(value), sizes.number(rule.entries))
    if isinstance(rule.chars, int):
        for idx, text in enumerate(value):
            check_count(f"{rule.path}[{idx}]", len(text), rule.chars, "characters long")
    # The entries of lists in the messages of a list count together.
    for inner in () if rule.inside is None else rule.inside.fields.values():
        if inner.is_list:
            name = inner.path.rpartition(".")[2]
            check_count(inner.path, sum(len(getattr(message, name)) for message in value), sizes.number(inner.entries))


def _reported() -> Iterator[tuple[str, Rule, str]]:
    """Yields each field of RequestLimits that reports a limit, the rule, and the name of the number in it."""
    for field in control_pb2.RequestLimits.DESCRIPTOR.fields:
        if reported := field.GetOptions().Extensions[limits_pb2.tells]:
            request, _, path = reported.partition(".")
            path, _, part = path.rpartition(".")
            kind: Any = getattr(pb if hasattr(pb, request) else control_pb2, request)
            yield field.name, next(rule for rule in rules_of(kind.DESCRIPTOR).walk() if rule.path == path), part


_REPORTED = tuple(_reported())


def limits_reply(sizes: Sizes, caller: CallerLimits, *, max_message_bytes: int) -> control_pb2.RequestLimits:
    """Returns the limits of a caller's requests to the served model."""
    limits = control_pb2.RequestLimits(max_message_bytes=max_message_bytes, max_metadata_bytes=MAX_METADATA_BYTES)
    for name, rule, part in _REPORTED:
        setattr(limits, name, sizes.number(getattr(rule, part)))
    limits.min_priority, limits.max_priority = caller.min_priority, caller.max_priority
    if caller.max_new_tokens is not None:
        limits.max_new_tokens = caller.max_new_tokens
    return limits
