"""Owns the grammar of a constraint: one canonical text for llguidance. Pure; imports no llguidance."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from tandem.v1 import constraint_pb2, inference_pb2

from scheduler_svc.frontend.constraints.json_schema import check_schema, parsed
from scheduler_svc.frontend.constraints.lark import checked_lark
from scheduler_svc.frontend.constraints.limits import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_ITEM_CHARS,
    GrammarError,
    too_large,
)
from scheduler_svc.frontend.constraints.lowering import Lowered
from scheduler_svc.frontend.constraints.repetition import check_pattern
from scheduler_svc.frontend.tools.places import ONLY_JSON

# An escape such as \\u0061 would be another spelling of a name, which llguidance takes for another name.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# A blank after each comma and colon, as people and models write JSON in one line, and no other white space.
JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, **_ESCAPES}


def grammar_of(constraint: constraint_pb2.Constraint) -> str:
    """Returns the grammar of a constraint of a request. Raises GrammarError."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise GrammarError("constraint is empty; give json_schema, json_object, regex, choices or lark")
    if (size := constraint.ByteSize()) > MAX_BYTES:
        raise too_large("constraint", "it has", size, MAX_BYTES, " bytes")
    match kind:
        case "json_schema":
            grammar = json_grammar("constraint.json_schema", constraint.json_schema)
        case "json_object":
            grammar = json_grammar("constraint.json_object", '{"type": "object"}')
        case "regex":
            check_pattern("constraint.regex", constraint.regex)
            grammar = _lark(f"start: /{_escaped(constraint.regex)}/")
        case "choices":
            grammar = _choices(constraint.choices.choices)
        case "lark":
            grammar = _lark(*checked_lark("constraint.lark", constraint.lark, _inline))
    within_limit("constraint", grammar)
    return grammar


def json_grammar(field: str, text: str) -> str:
    """Returns the grammar of a JSON schema. Raises GrammarError."""
    lowered = check_schema(field, parsed(field, text))
    grammar: dict[str, object] = {"json_schema": _with_options(field, lowered, JSON_OPTIONS)}
    # The worker reads it; llguidance does not.
    return _text({**grammar, "json_places": ONLY_JSON} if lowered.has_free_names else grammar)


def _with_options(field: str, lowered: Lowered, options: Mapping[str, object]) -> dict[str, Any]:
    """A schema as llguidance takes it, with its options in the root. Raises GrammarError."""
    if lowered.schema is False:
        raise GrammarError(f"{field} is false; no output would match it")
    return {**({} if lowered.schema is True else lowered.schema), "x-guidance": options}


def _inline(field: str, schema: Mapping[str, Any] | bool) -> tuple[dict[str, Any], bool]:
    """The schema of %json in a grammar of a caller, which has its own white space, and whether it leaves names open."""
    lowered = check_schema(field, schema)
    return _with_options(field, lowered, _ESCAPES), lowered.has_free_names


class WrittenSchemas:
    """The schemas of an answer of a chat as llguidance takes them: each is checked and written once."""

    def __init__(self, field: str) -> None:
        """`field`: how an error names a schema that has no field of its own."""
        self._field = field
        # By the id of a schema, which is kept so that no other one gets its id.
        self._known = dict[int, tuple[Mapping[str, Any], str, bool]]()

    def __call__(self, schema: Mapping[str, Any], field: str = "") -> tuple[str, bool]:
        """The text of a schema, and whether an object under it may have names that it does not list.

        Raises GrammarError.
        """
        if id(schema) not in self._known:
            lowered = check_schema(field or self._field, schema)
            text = _compact(_with_options(field or self._field, lowered, JSON_OPTIONS))
            self._known[id(schema)] = schema, text, lowered.has_free_names
        return self._known[id(schema)][1:]


def _choices(texts: Sequence[str]) -> str:
    field = "constraint.choices.choices"
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise GrammarError(f"{field} is {len(texts)} long; it must be between 1 and {MAX_CHOICES}")
    for i, text in enumerate(texts):
        if not text:
            raise GrammarError(f"{field}[{i}] is empty; at least 1 character is needed")
        if len(text) > MAX_ITEM_CHARS:
            raise too_large(field, f"entry {i} has", len(text), MAX_ITEM_CHARS, " characters")
    # The same choice twice makes the same outputs.
    return _lark("start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))


def _escaped(pattern: str) -> str:
    """A pattern between slashes in one line of a grammar."""
    out: list[str] = []
    is_escaped = False
    for char in pattern:
        if is_escaped:
            # An escaped line break is a line break.
            out.append({"\n": "n", "\r": "r"}.get(char, char))
            is_escaped = False
        elif char in "/\n\r":
            out.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}[char])
        else:
            out.append(char)
            is_escaped = char == "\\"
    return "".join(out)


def _lark(text: str, has_free_names: bool = False) -> str:
    if has_free_names:
        return _text({"lark_grammar": text, "json_places": ONLY_JSON})
    # llguidance reads a text that begins with a brace as JSON.
    return _text({"lark_grammar": text}) if text.lstrip().startswith("{") else text


def _text(grammar: dict[str, object]) -> str:
    return _compact({"grammars": [grammar]})


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def within_limit(field: str, grammar: str) -> None:
    """Refuses a grammar that is too long to be kept and sent. Raises GrammarError."""
    if (size := len(grammar.encode())) > MAX_BYTES:
        raise too_large(field, "the grammar made of it has", size, MAX_BYTES, " bytes")


def hash_of(grammar: str) -> bytes:
    """The name of a grammar: the SHA-256 of its text, 32 bytes."""
    return sha256(grammar.encode()).digest()


def check_combination(request: inference_pb2.GenerateRequest, what: str) -> None:
    """Refuses fields that would leave a constrained output no token, or go on after its end. Raises GrammarError.

    `what` is the field that constrains the output.
    """
    sampling, stop = request.sampling, request.stop
    for name, is_set in (
        ("stop.min_new_tokens", stop.min_new_tokens > 0),
        ("stop.ignore_eos", stop.ignore_eos),
        ("sampling.allowed_token_ids", sampling.HasField("allowed_token_ids")),
        ("sampling.banned_token_ids", bool(sampling.banned_token_ids)),
    ):
        if is_set:
            raise GrammarError(f"{name} and {what} exclude each other; {what} says which tokens may come")
