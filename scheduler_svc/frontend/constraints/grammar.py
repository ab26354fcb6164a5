"""Owns the grammar of a constraint: one canonical text for llguidance. Pure; imports no llguidance.

A grammar of llguidance's dialect of Lark is read as a list of words, with just enough of the dialect to find rules and
quantifiers; whether it is valid is llguidance's to say.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tandem.v1 import constraint_pb2, inference_pb2

from scheduler_svc.frontend.constraints import limits
from scheduler_svc.frontend.constraints.answer_grammar import ONLY_JSON
from scheduler_svc.frontend.constraints.json_schema import parsed
from scheduler_svc.frontend.constraints.limits import CHOICES, MAX_CONSTRAINT_BYTES, GrammarError, too_large, wrong
from scheduler_svc.frontend.constraints.lowering import lower
from scheduler_svc.frontend.constraints.patterns import (
    UnreadError,
    between_slashes,
    bound_of,
    characters,
    parts,
    repetition,
)

# Possessive where a word can be long, and no `[` or `<` inside a bracket: the time grows as the text does.
_WORD = re.compile(
    r"""
    (?P<comment> (//|\#)[^\n]* )
  | (?P<string> "(\\.|[^"\\\n])*+"i? )
  | (?P<regex> /(?!/)(\\.|[^/\\\n])++/[imslux]* )
  | (?P<json> %(json|llguidance)\b )
  | (?P<rule> [?!]?[A-Za-z_][\w\-]*+ (\.-?\d++)?+
        (\s*\[ ("(\\.|[^"\\\n])*+" | /(\\.|[^/\\\n])++/ | [^\[\]\n"/])*+ \])?+ \s*+ : (?!:) )
  | (?P<bounds> \{\s*+\d*+\s*+,?+\s*+\d*+\s*+\} | ~\s*+\d++(\s*\.\.\s*+\d++)?+ )
  | (?P<name> @?[A-Za-z_][\w\-]* )
  | (?P<token> <[^<>\n]*+> )
  | (?P<mark> %[a-z]+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_DIGITS = re.compile(r"\d+")
# In a string: what begins an object, a list or a string of JSON, or may.
_MAY_BEGIN_JSON = re.compile(r'[{\["]|\\[xu]')
# An escape such as \\u0061 would be another spelling of a name, which llguidance takes for another name.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# How an error names the grammar of a chat's answer.
ANSWER = "the answer"
# A blank after each comma and colon, as people and models write JSON in one line, and no other white space.
JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, **_ESCAPES}


@dataclass(slots=True)
class _Rule:
    """What a rule contains: parts with the product of the repetitions around each; names are measured later."""

    literal: int = 1
    names: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])


def _checked(name: str, text: str) -> tuple[str, bool]:
    """Refuses a grammar with sizes beyond the limits. Returns it with its JSON schemas as llguidance keeps them, and
    whether an object in its output may have names that they do not list.

    `name` is the request's field. Raises GrammarError.
    """
    rules: dict[str, _Rule] = {}
    words, whole, has_free_names = _words(name, text)
    if has_free_names and (word := next((word for kind, word in words if _may_begin_json(kind, word)), None)):
        what = f"{word[:64]!r} may match a brace or a quote, and the schema of a %json does not list all names"
        instead = 'list them with additionalProperties: false, or leave [, { and " out of the text outside of %json'
        raise wrong(name, f"{what}, so one could come twice; {instead}")
    alternatives = sum(word == "|" for _, word in words)
    if alternatives + 1 > limits.MAX_ALTERNATIVES:
        raise too_large(name, "the rules have", alternatives + 1, limits.MAX_ALTERNATIVES, " alternatives")
    body: list[tuple[str, str]] = []
    current = ""
    for kind, word in [*words, ("rule", ":")]:
        if kind != "rule":
            body.append((kind, word))
            continue
        if current:
            rules[current] = _read(name, body)
        current, body = re.split(r"[\s.:\[]", word.lstrip("?!"), maxsplit=1)[0], []
    measured: dict[str, int] = {}
    for rule in rules:
        _measure(name, rule, rules, measured, 0)
    return whole, has_free_names


def _words(name: str, text: str) -> tuple[list[tuple[str, str]], str, bool]:
    """The words that matter, in order, and the text with other schemas, which are left out of the words.

    The last value says whether one of the schemas leaves names open.
    """
    has_free_names = False
    words: list[tuple[str, str]] = []
    pieces: list[str] = []
    position = copied = 0
    while (match := _WORD.match(text, position)) is not None:
        kind, word, position = str(match.lastgroup), match[0], match.end()
        if kind == "json":
            begin = position
            position = _after_json(name, text, begin)
            if word == "%json":
                # A grammar of a caller has its own white space.
                schema, is_free = _written(name, parsed(name, text[begin:position].strip()), _ESCAPES)
                has_free_names |= is_free
                pieces += [text[copied:begin], " ", _compact(schema)]
                copied = position
        elif kind != "comment" and not word.isspace():
            words.append((kind, word))
    return words, "".join([*pieces, text[copied:]]), has_free_names


def _may_begin_json(kind: str, word: str) -> bool:
    """Whether a word may stand for text with a character that begins JSON."""
    if kind == "rule":
        # Where a lexeme stops.
        return any(option in word.partition("[")[2] for option in ("stop", "suffix"))
    if kind == "string":
        return _MAY_BEGIN_JSON.search(word[1 : word.rindex('"')]) is not None
    if kind != "regex":
        # Tokens by number, other terminals, what a terminal is not, ranges, other grammars.
        return kind != "bounds" and word != "%ignore" and word.startswith(("<[", "%", "~", ".", "@"))
    try:
        # A brace that stands for itself has a backslash.
        pattern_parts = [part for part in parts(word[1 : word.rindex("/")]) if part != "{"]
        return "." in pattern_parts or any(
            first <= ord(char) <= last for part in pattern_parts for first, last in characters(part) for char in '{["'
        )
    except UnreadError:
        return True


def _after_json(name: str, text: str, position: int) -> int:
    """Returns the position behind a JSON value in a grammar."""
    start = len(text) - len(text[position:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{name}: what follows %json or %llguidance is not JSON: {error}") from None
    return end


def _read(name: str, body: list[tuple[str, str]]) -> _Rule:
    """Reads the body of a rule: a quantifier multiplies what stands before it, a word or a group."""
    groups, last = [_Rule()], _Rule()
    for kind, word in body:
        if kind == "mark" and word in "([":
            groups.append(_Rule())
            last = _Rule()
            if len(groups) > limits.MAX_DEPTH + 1:
                raise too_large(name, "groups are nested", len(groups) - 1, limits.MAX_DEPTH, " deep")
            continue
        if kind == "mark" and word in ")]" and len(groups) > 1:
            last = groups.pop()
        elif kind == "bounds":
            numbers = _DIGITS.findall(word)
            count = bound_of(numbers[0] if numbers else "", numbers[-1] if numbers else "")
            last = _Rule(last.literal * count, [(name, times * count) for name, times in last.names])
        elif kind == "mark" and word in "*+?":
            continue
        elif kind == "regex":
            last = _Rule(repetition(name, word[1 : word.rindex("/")]))
        elif kind == "name":
            last = _Rule(1, [(word, 1)])
        else:
            last = _Rule()
        inside = groups[-1]
        inside.literal = max(inside.literal, last.literal)
        inside.names += last.names
    return groups[0]


def _measure(field_name: str, rule: str, rules: dict[str, _Rule], measured: dict[str, int], depth: int) -> int:
    """Returns the largest product of nested repetitions of a rule. A recursive rule counts as 1 inside itself."""
    if rule not in rules or rule in measured:
        return measured.get(rule, 1)
    if depth > limits.MAX_DEPTH:
        raise too_large(field_name, "rules are nested", depth, limits.MAX_DEPTH, " deep")
    measured[rule] = 1
    product = rules[rule].literal
    for name, times in rules[rule].names:
        product = max(product, times * _measure(field_name, name, rules, measured, depth + 1))
    if product > limits.MAX_REPETITION:
        where = f" (in rule {rule[:64]})"
        raise too_large(field_name, "nested repetitions make", product, limits.MAX_REPETITION, where)
    measured[rule] = product
    return product


def grammar_of(constraint: constraint_pb2.Constraint) -> str:
    """Returns the grammar of a constraint of a request. Raises GrammarError."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise GrammarError("constraint is empty; give json_schema, json_object, regex, choices or lark")
    if (size := constraint.ByteSize()) > MAX_CONSTRAINT_BYTES:
        raise too_large("constraint", "it has", size, MAX_CONSTRAINT_BYTES, " bytes")
    match kind:
        case "json_schema":
            grammar = json_grammar("constraint.json_schema", constraint.json_schema)
        case "json_object":
            grammar = json_grammar("constraint.json_object", '{"type": "object"}')
        case "regex":
            if not constraint.regex:
                raise GrammarError("constraint.regex is empty; a pattern has at least 1 character")
            repetition("constraint.regex", constraint.regex)
            grammar = _lark(f"start: /{between_slashes(constraint.regex)}/")
        case "choices":
            grammar = _choices(constraint.choices.choices)
        case "lark":
            grammar = _lark(*_checked("constraint.lark", constraint.lark))
    within_limit("constraint", grammar)
    return grammar


def json_grammar(field: str, text: str) -> str:
    """Returns the grammar of a JSON schema. Raises GrammarError."""
    schema, is_free = _written(field, parsed(field, text), JSON_OPTIONS)
    return _text({"json_schema": schema}, is_free)


def _written(
    field: str, schema: Mapping[str, Any] | bool, options: Mapping[str, object]
) -> tuple[dict[str, Any], bool]:
    """A schema as llguidance takes it, with options in its root, and whether an object under it may have names that it
    does not list. Raises GrammarError."""
    lowered, has_free_names = lower(field, schema)
    if lowered is False:
        raise GrammarError(f"{field} is false; no output would match it")
    return {**({} if lowered is True else lowered), "x-guidance": options}, has_free_names


class WrittenSchemas:
    """The schemas of an answer of a chat as llguidance takes them: each is checked and written once."""

    def __init__(self) -> None:
        # By the id of a schema, which is kept so that no other one gets its id.
        self._known = dict[int, tuple[Mapping[str, Any], str, bool]]()

    def __call__(self, schema: Mapping[str, Any], field: str = ANSWER) -> tuple[str, bool]:
        """The text of a schema, and whether an object under it may have names that it does not list.

        Raises GrammarError.
        """
        if id(schema) not in self._known:
            written, is_free = _written(field, schema, JSON_OPTIONS)
            self._known[id(schema)] = schema, _compact(written), is_free
        return self._known[id(schema)][1:]


def _choices(texts: Sequence[str]) -> str:
    field = "constraint.choices.choices"
    if not 1 <= len(texts) <= CHOICES.entries:
        raise GrammarError(f"{field} is {len(texts)} long; it must be between 1 and {CHOICES.entries}")
    for i, text in enumerate(texts):
        if not text:
            raise GrammarError(f"{field}[{i}] is empty; at least 1 character is needed")
        if len(text) > CHOICES.chars:
            raise too_large(field, f"entry {i} has", len(text), CHOICES.chars, " characters")
    # The same choice twice makes the same outputs.
    return _lark("start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))


def _lark(text: str, has_free_names: bool = False) -> str:
    # llguidance reads a text that begins with a brace as JSON.
    is_json = has_free_names or text.lstrip().startswith("{")
    return _text({"lark_grammar": text}, has_free_names) if is_json else text


def _text(grammar: Mapping[str, object], has_free_names: bool) -> str:
    # The worker reads where JSON stands; llguidance does not.
    return _compact({"grammars": [{**grammar, "json_places": ONLY_JSON} if has_free_names else grammar]})


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def within_limit(field: str, grammar: str) -> None:
    """Refuses a grammar that is too long to be kept and sent. Raises GrammarError."""
    if (size := len(grammar.encode())) > MAX_CONSTRAINT_BYTES:
        raise too_large(field, "the grammar made of it has", size, MAX_CONSTRAINT_BYTES, " bytes")


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
