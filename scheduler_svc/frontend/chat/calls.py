"""Owns the calls of tools in an answer: their names and arguments from the text of a region, and their ids. Pure.

Arguments that a family writes as one JSON object are shown while they are written: a call begins to be shown with the
first brace of its arguments, when its name is known. From then on it stays a call: what does not belong
to its arguments is content.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple, cast

from scheduler_svc.frontend.chat.bodies import ObjectReader, TaggedReader, escape_controls, plain, reader_of
from scheduler_svc.frontend.chat.conversation import inside, type_of

# Letters and digits, as Mistral's templates demand of ids.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
ID_CHARS = 9
CALLS_FIELD = "tool_calls"
# How a call that has its name inside begins; other orders of the keys are read only whole.
_BEGIN = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,128})"(\s*,\s*"arguments"\s*:\s*(?=\{))?')
MAX_HEAD_CHARS = 1024
# How deep the types of an argument are looked for.
_MAX_NESTED = 4
# More than there are.
_MAX_TYPES = 16


class Call(NamedTuple):
    """A call of a tool. `arguments` is a compact JSON object, or the beginning of one."""

    name: str
    arguments: str


def call_id(request_id: str, sample_idx: int, call_idx: int) -> str:
    """The id of a call: the same one whenever the answer is built again."""
    number = int.from_bytes(sha256(f"{request_id}\0{sample_idx}\0{call_idx}".encode()).digest())
    letters = list[str]()
    for _ in range(ID_CHARS):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)


def read_calls(mark: str, text: str, spec: Any, argument_types: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """The calls in the text of a region that `mark` opened. Empty if it is not a valid region of calls."""
    # Imported with the response template.
    from transformers.utils import chat_parsing

    parse_response: Any = cast(Any, chat_parsing).parse_response
    tools = [
        {"function": {"name": name, "parameters": {"properties": types}}} for name, types in argument_types.items()
    ]
    field: Any = spec.fields[CALLS_FIELD]
    if isinstance(reader := reader_of(field), TaggedReader):
        reader.feed(text)
        text = text if reader.is_broken else reader.text
    elif field.content == "json" and not field.content_args:
        text = escape_controls(text)
    # The region is known, so an end mark in it is text.
    endless = dataclasses.replace(field, close_re=None)
    spec = dataclasses.replace(spec, fields={**spec.fields, CALLS_FIELD: endless})
    try:
        message: dict[str, Any] = parse_response(mark + text, spec, prefix="", tools=tools)
        is_marked = text != plain(text)
        return [_call(value, argument_types, is_marked) for value in _flat(message.get(CALLS_FIELD))]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def cut_calls(mark: str, text: str, spec: Any, argument_types: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """As `read_calls`, of a region that the end of the answer cuts off. The last call may be incomplete.

    A call is left out until its name is known.
    """
    field: Any = spec.fields[CALLS_FIELD]
    match, name = field.open_re.search(mark + text, partial=True), ""
    if "name" in field.open_re.groupindex:
        # Without text after it the name may have been to go on.
        name = match["name"] if match is not None and match.end("name") < len(mark + text) else ""
        if not name:
            return []
    calls = read_calls(mark, text, spec, argument_types)
    if field.content != "json":
        # Another argument may have been to come.
        return [Call(call.name, call.arguments[:-1] if call.arguments != "{}" else "") for call in calls]
    if calls:
        return calls
    if name:
        return [Call(name.strip(), "")]
    whole, rest = _elements(text) if field.transform_each else ("", text)
    calls = read_calls(mark, f"[{whole}]", spec, argument_types) if whole else []
    if (begin := _BEGIN.match(rest)) is not None:
        reader = ObjectReader()
        arguments, _ = reader.feed(rest[begin.end() :])
        calls.append(Call(begin[1], arguments + reader.held))
    return calls


def _elements(text: str) -> tuple[str, str]:
    """(the whole elements of a list that is cut off, the one after them)."""
    start = end = len(text) - len(text.lstrip()) + 1
    decoder = json.JSONDecoder(strict=False)
    while end < len(text):
        at = end + len(text[end:]) - len(text[end:].lstrip(", \n\t\r"))
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return text[start:end], text[at:]
    return text[start:end], ""


def _flat(value: object) -> list[object]:
    if isinstance(value, list):
        return [inner for item in cast(list[object], value) for inner in _flat(item)]
    return [] if value is None else [value]


def _call(value: object, types: Mapping[str, Mapping[str, Any]], is_marked: bool) -> Call:
    """Raises ValueError or TypeError if it is not a call."""
    if not isinstance(value, dict):
        raise TypeError("not an object")
    given = cast(dict[str, Any], value)
    function = cast(dict[str, Any], given.get("function", given))
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise TypeError("no name, or arguments that are not an object")
    name.encode()
    may_be = types.get(name.strip(), {})
    read = {
        key: _unquoted(one) if may_be.get(key, {}).get("quoted") else one
        for key, one in cast(dict[str, Any], arguments).items()
    }
    return Call(name.strip(), compact(read, is_marked=is_marked))


def _unquoted(value: object) -> object:
    """A tagged value that is a string of JSON, as a grammar has the model write where others than strings are valid."""
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        with suppress(ValueError):
            return json.loads(value)
    return value


def compact(value: object, *, is_marked: bool = False) -> str:
    """The value as JSON without spaces; its strings may be marked. Raises ValueError if JSON has no such value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if is_marked:
        text = plain(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can write but no message can carry.
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text


def argument_types(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The types of the arguments of each tool, and which may be in quotes: all that tagged values are read by."""
    types = dict[str, dict[str, Any]]()
    for tool in tools:
        function = tool["function"]
        parameters: dict[str, Any] = function.get("parameters") or {}
        properties = parameters.get("properties")
        if isinstance(properties, dict):
            schemas, known = cast(dict[str, Any], properties), dict[int, list[str]]()
            types[function["name"]] = {
                # Where anything is valid, a number may as well be a text with zeros before it.
                name: {"type": _types(schema, parameters, known) or ["object", "array"], "quoted": not is_text(schema)}
                for name, schema in schemas.items()
            }
    return types


def is_text(schema: object) -> bool:
    """Whether a tagged argument with this schema is a string, which is written without quotes."""
    if not isinstance(schema, dict):
        return False
    given = cast(Mapping[str, object], schema)
    values = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in cast(list[object], values))
    return given.get("type") == "string"


def _types(schema: object, parameters: dict[str, Any], known: dict[int, list[str]], depth: int = 0) -> list[str]:
    """The types that a schema takes, in its order; empty if it does not say. References point into the parameters.

    known: those of what references lead to, by its id: it is read once, in however many ways a pointer is written.
    """
    if not isinstance(schema, dict) or depth > _MAX_NESTED:
        return []
    given = cast(dict[str, Any], schema)
    declared: Any = given.get("type")
    types: list[Any] = [declared] if isinstance(declared, str) else [*_listed(declared)]
    if not types:
        types += [type_of(value) for value in ([given["const"]] if "const" in given else _listed(given.get("enum")))]
    if not types and isinstance(reference := given.get("$ref"), str):
        found = inside(parameters, "", reference[1:]) if re.match(r"#(/|\Z)", reference) else None
        target = found and found[0]
        if id(target) not in known:
            known[id(target)] = []
            known[id(target)] = _types(target, parameters, known, depth + 1)
        types += known[id(target)]
    elif not types:
        parts = (_types(part, parameters, known, depth + 1) for part in _listed(given.get("allOf")))
        types += next(filter(None, parts), list[str]())
    for choice in (*_listed(given.get("anyOf")), *_listed(given.get("oneOf"))):
        types += _types(choice, parameters, known, depth + 1)
    if given.get("nullable"):
        types.append("null")
    return [*islice(dict.fromkeys(name for name in types if isinstance(name, str)), _MAX_TYPES)]


def _listed(value: object) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


class CallStream:
    """One region with one call. `mark` is the text that opened it."""

    def __init__(self, field: Any, mark: str) -> None:
        # The reader of the arguments.
        self.reader = ObjectReader()
        self.name = ""
        # The text before the arguments; what follows them, from the end of the object or an error on.
        self._head = self._rest = ""
        self.has_begun = False
        self._is_hopeless = False
        if _arguments(field) == "{content}":
            # The pattern may look ahead to the first brace.
            match = field.open_re.match(mark + "{")
            self.name = match["name"].strip() if match is not None and match["name"] else ""
            self._is_hopeless = not self.name

    def feed(self, text: str) -> Call | None:
        """What `text` shows of the call: its name with the first piece, then arguments."""
        if self._is_hopeless:
            return None
        if self.has_begun:
            return Call("", self._read(text)) if text else None
        self._head += text
        if self.name:
            begins = self._head.lstrip()
            self._is_hopeless = bool(begins) and not begins.startswith("{")
            arguments = begins
        else:
            match, arguments = _BEGIN.match(self._head), ""
            if match is not None and match[2]:
                self.name, arguments = match[1], self._head[match.end() :]
            else:
                self._is_hopeless = len(self._head) > MAX_HEAD_CHARS
        if self._is_hopeless or not arguments:
            return None
        self.has_begun = True
        return Call(self.name, self._read(arguments))

    def rest(self) -> str:
        """At the end of the region: its text that is not part of the call, unless it only ends the call."""
        rest = self.reader.held + self._rest
        return "" if self.reader.is_complete and re.fullmatch(r"\s*\}?\s*", rest) else rest

    def _read(self, text: str) -> str:
        certain, num_read = self.reader.feed(text)
        self._rest += text[num_read:]
        return certain


def can_show(field: Any) -> bool:
    """Whether calls of this field are written as JSON that is shown as it comes."""
    if field.content != "json" or field.content_args or field.transform_each or not isinstance(field.transform, dict):
        return False
    return _arguments(field) in ("{content}", "{content.arguments}")


def _arguments(field: Any) -> object:
    """Where a transform finds the arguments; with its second form the call has its name inside."""
    return field.transform.get("function", {}).get("arguments")
