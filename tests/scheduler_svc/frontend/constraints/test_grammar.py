"""The grammar of each kind of constraint, and what is refused without compiling it."""

import json
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from tandem.v1 import inference_pb2
from tandem.v1.constraint_pb2 import Choices, Constraint, JsonObject

from scheduler_svc.frontend.constraints.grammar import check_combination, grammar_of, hash_of
from scheduler_svc.frontend.constraints.json_schema import ENFORCED
from scheduler_svc.frontend.constraints.limits import GrammarError
from scheduler_svc.frontend.constraints.patterns import repetition
from tests.scheduler_svc.frontend.constraints.rig import accepts, matcher, schema

OBJECT = {"type": "object"}
BRACE = '{"grammars": [{"lark_grammar": "start: /a/"}]}'


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (schema({**OBJECT, "properties": {"a": {"type": "integer"}}, "required": ["a"]}), '{"a": 1}', '{"a":1}'),
        (schema({"type": "array", "items": {"type": "boolean"}}), "[true, false]", "[true,  false]"),
        (schema(True), '[1, {"a": null}]', "x"),
        (Constraint(json_object=JsonObject()), "{}", "[]"),
        (Constraint(regex="a/b{2}"), "a/bb", "a/b"),
        (Constraint(regex="a\\/b\nc"), "a/b\nc", "a\\/b\nc"),
        (Constraint(choices=Choices(choices=['a"\\', "\x00\n", "😀é"])), "😀é", "😀"),
        (Constraint(choices=Choices(choices=['a"\\', "\x00\n"])), "\x00\n", "\n"),
        (Constraint(choices=Choices(choices=['a"\\', "b"])), 'a"\\', "a"),
        (Constraint(lark='start: "a" ("b" | /c+/){2}'), "abcc", "abb c"),
    ],
)
def test_a_grammar_matches_the_whole_output(constraint: Constraint, good: str, bad: str) -> None:
    assert accepts(constraint, good)
    assert not accepts(constraint, bad)


def test_null_that_two_schemas_of_a_one_of_take_is_no_output() -> None:
    kinds = [{"$ref": f"#/$defs/{name}", "nullable": True} for name in "ab"]
    definitions = {"a": {"type": "integer"}, "b": {"type": "boolean"}}
    assert matcher(schema({"oneOf": kinds, "$defs": definitions})).is_error()
    plain = [{"$ref": f"#/$defs/{name}"} for name in "ab"]
    assert accepts(schema({"oneOf": plain, "$defs": definitions}), "true")


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_a_value_that_is_empty_is_enforced_as_any_other(value: object) -> None:
    text = json.dumps(value)
    for keyword in ({"const": value}, {"enum": [value]}):
        for whole, output in (
            (keyword, "{}"),
            ({"type": "object", "properties": {"a": keyword}, "required": ["a"]}, '{{"a": {}}}'),
            ({"type": "array", "items": keyword}, "[{}]"),
            ({"anyOf": [keyword, {"const": 1}]}, "{}"),
            # They exclude each other.
            ({"oneOf": [keyword, {"const": "word"}]}, "{}"),
            ({"oneOf": [keyword, {"type": "integer" if isinstance(value, str) else "string"}]}, "{}"),
        ):
            assert accepts(schema(whole), output.format(text)), whole
            assert not accepts(schema(whole), output.format("true")), whole


def test_a_lark_grammar_is_never_read_as_something_else() -> None:
    assert "expecting rule" in matcher(Constraint(lark=BRACE)).get_error()


def test_equal_constraints_have_one_text_and_the_order_of_properties_counts() -> None:
    spaced = Constraint(json_schema='{ "type" : "object" }')
    assert grammar_of(spaced) == grammar_of(schema({"type": "object"}))
    one, other = ({"properties": {a: {}, b: {}}} for a, b in (("a", "b"), ("b", "a")))
    assert hash_of(grammar_of(schema(one))) != hash_of(grammar_of(schema(other)))
    assert grammar_of(Constraint(choices=Choices(choices=["a", "a"]))) == grammar_of(
        Constraint(choices=Choices(choices=["a"]))
    )


def test_a_model_that_prefers_white_space_cannot_go_on_for_ever() -> None:
    value = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}, "maxItems": 3}},
             "required": ["a"], "additionalProperties": False}  # fmt: skip
    made = matcher(schema(value))
    spaces = [ord(char) for char in " \n\t\r"]
    output: list[int] = []
    while not made.is_stopped():
        allowed = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        token = next((one for one in spaces if one in allowed), int(allowed[allowed < 256][-1]))
        output.append(token)
        made.consume_token(token)
        assert len(output) < 60
    assert json.loads(bytes(output))["a"] is not None


# A schema that leads through more references than the stack holds.
CHAIN = {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)}}
A_OF_ITSELF = {"a": {"$ref": "#/$defs/a"}}
# A constraint, the text of a schema, or a schema, by a part of the refusal.
REFUSED: dict[str, Constraint | str | bool | dict[str, object]] = {
    "constraint is empty": Constraint(),
    "constraint: it has": Constraint(regex="a" * 70_000),
    "is not JSON": "{",
    "NaN, which is not JSON": '{"const": NaN}',
    "the key 'type' twice": '{"type": "string", "type": "null"}',
    "it must be an object or true": "3",
    "no output would match": False,
    "constraint.json_schema.properties.tags: llguidance does not support uniqueItems; leave it out": {
        "properties": {"tags": {"type": "array", "uniqueItems": True}}
    },
    "constraint.json_schema.anyOf[1]: llguidance does not support maxLenght": {
        "anyOf": [{}, {"type": "string", "maxLenght": 3}]
    },
    "does not support not; say what a value is": {"not": {"type": "string"}},
    "does not support not;": {"properties": {"a": {"not": {"not": {"type": "string"}}}}},
    "does not support propertyNames with $ref;": {
        **OBJECT, "propertyNames": {"$ref": "#/$defs/a"}, "$defs": A_OF_ITSELF
    },
    "does not support propertyNames with $ref and maxLength": {
        **OBJECT, "propertyNames": {"$ref": "#/$defs/a", "maxLength": 3}, "$defs": {"a": {"pattern": "^a"}}
    },
    "does not support propertyNames with not": {**OBJECT, "propertyNames": {"not": {"const": "a"}}},
    "does not support propertyNames with pattern and not": {
        **OBJECT, "propertyNames": {"pattern": "^a", "not": {"const": "ab"}}
    },
    "does not support propertyNames with anyOf": {
        **OBJECT, "propertyNames": {"anyOf": [{"type": "integer", "enum": ["a"]}, {"const": "b"}]}
    },
    "exclusiveMinimum must be a number or a boolean": {"minimum": 1, "exclusiveMinimum": "1"},
    "the dialect 'http://json-schema.org/draft-03/schema#'": {"$schema": "http://json-schema.org/draft-03/schema#"},
    "constraint.json_schema.properties.a: a schema must be an object or a boolean": {"properties": {"a": 3}},
    "maxItems must be an integer": {"maxItems": -1},
    "has 4098 characters; the limit is 4096": {"const": "x" * 4096},
    "nested repetitions make 10001": {"type": "string", "maxLength": 10_001},
    "nested repetitions make 1000000": {"maxItems": 1000, "items": {"type": "string", "maxLength": 1000}},
    "make 100000000": {
        "$defs": {"a": {"maxItems": 10_000, "items": True}}, "maxItems": 10_000, "items": {"$ref": "#/$defs/a"}
    },
    "constraint.json_schema.pattern: nested repetitions make 1000000": {"type": "string", "pattern": "(a{1000}){1000}"},
    "a' has no target": {"$ref": "#/$defs/a"},
    "9' has no target": '{"anyOf": [true], "$ref": "#/anyOf/' + "9" * 5000 + '"}',
    "references lead through more than 256 schemas": CHAIN,
    "constraint.json_schema has U+D800, half of a surrogate pair; only whole pairs are text": r'{"const": "\ud800"}',
    "has U+DFFF, half of a surrogate pair": r'{"properties": {"a\udfff": true}}',
    "constraint.json_schema has the number 1e400; the largest is 1.79769e+308": '{"minLength": 1e400}',
    "minProperties is 126, and the patterns and properties have 125 names": {
        **OBJECT, "patternProperties": {"^[a-e]{3}$": {}}, "additionalProperties": False, "minProperties": 126
    },
    "the patterns of names match 1040 names; the limit is 1024": {
        "patternProperties": {f"^[a-z]{i}$": True for i in range(50)}
    },
    "constraint.regex: nested repetitions make 1000000": Constraint(regex="((x{1000}){1000}){1000}"),
    "constraint.regex is empty": Constraint(regex=""),
    "groups are nested 65 deep": Constraint(regex="(" * 65 + "a" + ")" * 65),
    "choices is 0 long": Constraint(choices=Choices()),
    "choices is 1025 long": Constraint(choices=Choices(choices=[str(i) for i in range(1025)])),
    "choices[1] is empty": Constraint(choices=Choices(choices=["a", ""])),
    "entry 0 has 4097 characters": Constraint(choices=Choices(choices=["x" * 4097])),
    "(in rule start)": Constraint(lark='start: a{1000}\na: "x"{1000}'),
    "make 20000 (in rule a); the limit is 10000": Constraint(lark='start: a\na[stop=/x[0-9]/]: "b"{20000}'),
    "constraint.lark: nested repetitions make 20000": Constraint(lark="start: /(ab){20000}/"),
    "have 1025 alternatives": Constraint(lark="start: " + "|".join(['"a"'] * 1025)),
    "rules are nested 65 deep": Constraint(lark="\n".join(f"r{i}: r{i + 1}" for i in range(80))),
    "constraint.lark: llguidance does not support uniqueItems": Constraint(
        lark='start: %json {"type": "array", "uniqueItems": true}'
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_refusal_names_the_field_the_number_and_the_limit(sentence: str) -> None:
    given = REFUSED[sentence]
    text = given if isinstance(given, str) else json.dumps(given) if not isinstance(given, Constraint) else ""
    with pytest.raises(GrammarError) as refused:
        grammar_of(given if isinstance(given, Constraint) else Constraint(json_schema=text))
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("constraint") and "\n" not in str(refused.value)


# No value of these strings and names can be written, which llguidance alone finds late.
LATE = {
    "a class": {"pattern": r"^[\x01]$"},
    "a class as it is": {"pattern": "^[\x01-\x05]+$"},
    "a class of others": {"pattern": r"^[^ -\x{10ffff}\t\n\f\r\x08]$"},
    "a class in classes": {"pattern": r"^a?[\p{Cc}&&[\x00-\x05]]$"},
    "a named class": {"pattern": r"^[[:cntrl:]&&[^\x08-\x0d]]$"},
    "of a length": {"pattern": r"^[\x01]?$", "minLength": 1},
    "longer than its pattern": {"pattern": "^a{1,3}$", "minLength": 4},
    "both patterns": {"allOf": [{"pattern": r"^[\x01a]$"}, {"pattern": r"^[\x01b]$"}]},
}


@pytest.mark.parametrize("name", LATE)
def test_a_string_that_llguidance_cannot_write_is_refused_before_the_output_comes_to_it(name: str) -> None:
    value = {"type": "string", **LATE[name]}
    object_ = {"type": "object", "properties": {"b": {"type": "integer"}, "a": value}, "required": ["b", "a"]}
    assert "Unsatisfiable schema" in matcher(schema(object_)).get_error()
    # Where it need not come, everything else may.
    del object_["required"]
    assert not matcher(schema(object_)).get_error()


# Patterns of names that control characters alone match; llguidance does not write those.
ONLY_CONTROLS = [r"[\x01]", "[\x01-\x05]+", r"[\p{Cc}&&[\x00-\x05]]+", r"a[\x00]"]
NEGATED = [r"[^ -\x{10ffff}\t\n\f\r\x08]", r"[^\s\S]", r"[^\x00-\x{10FFFF}]", r"[^\P{Cc}\t\n\f\r\x08]", "[^[^a]b]"]


@pytest.mark.parametrize("part", [*ONLY_CONTROLS, *NEGATED])
def test_a_pattern_of_names_that_may_leave_control_characters_only_is_refused(part: str) -> None:
    found: list[object] = [{"patternProperties": {f"^{part}$": {}}}, {"propertyNames": {"pattern": f"^{part}$"}}]
    if part in NEGATED:
        patterns = (f"^{part}$", f"^a{part}{{2}}", part)
        found = [{"patternProperties": {pattern: {}}, "minProperties": 1} for pattern in patterns]
    for given in found:
        with pytest.raises(GrammarError, match="control character"):
            grammar_of(schema({**OBJECT, **given}))


def test_a_negated_class_of_names_that_leaves_few_is_those() -> None:
    value = {**OBJECT, "patternProperties": {r"^[^\x20-\x{10ffff}]$": {"const": 1}}, "additionalProperties": False}
    assert accepts(schema(value), r'{"\t": 1, "\n": 1}')


FREE = '%json {"type": "object"}'


@pytest.mark.parametrize(
    "text",
    [
        f"start: {FREE}", f'start: "a: " {FREE} /[^\\[{{"]*/',
        f'start: <|x|> /[a-z]{{2,3}}\\s\\d/ {FREE}\n%ignore /[ \\n]+/',
        f'start: a{{1,2}} | {FREE}\na: {FREE} ("x" | "y")*',
    ],
)  # fmt: skip
def test_a_lark_grammar_says_where_its_json_stands(text: str) -> None:
    grammar = json.loads(grammar_of(Constraint(lark=text)))["grammars"]
    assert [sorted(one) for one in grammar] == [["json_places", "lark_grammar"]]
    # Where all names are listed, it need not.
    closed = text.replace('"object"', '"object", "additionalProperties": false')
    assert "json_places" not in grammar_of(Constraint(lark=closed))


@pytest.mark.parametrize(
    "word",
    [
        "/(.|\\n)*/", '"{"', '"\\""', r'"\x7b"', r"/\x7B/", r"/\u{5b}/",
        "/[A-z]/", r"/[^a]/", r"/\S/", r"/\p{P}/", "/[a&&b]/",
        "<[7]>",
        "<[*]>", "~/a/", '"A".."z"', '%regex {"substring_chars": "a{"}',
    ],
)  # fmt: skip
def test_json_with_open_names_beside_text_that_may_look_like_json_is_refused(word: str) -> None:
    for text in (f"start: {word} {FREE}", f"start: X {FREE}\nX: {word}", f'start: x {FREE}\nx[suffix={word}]: "a"'):
        with pytest.raises(GrammarError, match="list them with additionalProperties: false"):
            grammar_of(Constraint(lark=text))
    grammar_of(Constraint(lark=f'start: {word} %json {{"type": "null"}}'))


def test_a_pattern_of_names_with_a_negated_class_stays_beside_other_names() -> None:
    names = {"patternProperties": {"^[^a]+$": {}}, "properties": {"ab": {}}}
    assert "[^a]+" in grammar_of(schema({"type": "object", **names, "additionalProperties": False}))


def test_nested_json_is_refused_at_the_limit() -> None:
    def nested(depth: int) -> Constraint:
        return Constraint(json_schema='{"items":' * depth + "true" + "}" * depth)

    grammar_of(nested(63))
    for depth in (64, 5_000):
        with pytest.raises(GrammarError, match="nested"):
            grammar_of(nested(depth))


@pytest.mark.parametrize(
    ("pattern", "product"),
    [
        ("abc", 1), ("a*", 1), ("a{3}", 3), ("a{2,5}b{4}", 5), ("a{7,}", 7), ("(a{3}b){4}", 12), ("(a|b{3}|c)*{2}", 6),
        ("[{9}]{3}", 3), (r"\({9}", 9), ("[[:alpha:]]{4}", 4), ("[a&&[b]]{5}", 5), ("x{,6}", 6), ("a{x}", 1),
        ("((a{2}){3}c){4}d", 24), (r"[\]]{8}", 8), ("(?:a{2}){2}", 4),
    ],
)  # fmt: skip
def test_nested_repetitions_are_multiplied(pattern: str, product: int) -> None:
    assert repetition("field", pattern) == product


def test_recursive_schemas_and_rules_are_measured_once() -> None:
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 100}}, "$ref": "#/$defs/t"}
    grammar_of(schema(tree))
    grammar_of(Constraint(lark='start: "(" start{0,100} ")"'))


def test_every_keyword_on_the_list_changes_what_llguidance_takes() -> None:
    """Otherwise a keyword on the list would be silently without effect."""
    examples: dict[str, tuple[object, str]] = {
        "type": ({"type": "null"}, "1"), "enum": ({"enum": [1]}, "2"), "const": ({"const": 1}, "2"),
        "properties": ({"properties": {"a": {"type": "null"}}}, '{"a": 1}'), "required": ({"required": ["a"]}, "{}"),
        "additionalProperties": ({"additionalProperties": False}, '{"a": 1}'),
        "patternProperties": ({"patternProperties": {"^a": {"type": "null"}}}, '{"a": 1}'),
        "minProperties": ({"minProperties": 1}, "{}"), "maxProperties": ({"maxProperties": 0}, '{"a": 1}'),
        "items": ({"items": {"type": "null"}}, "[1]"), "prefixItems": ({"prefixItems": [{"type": "null"}]}, "[1]"),
        "minItems": ({"minItems": 1}, "[]"), "maxItems": ({"maxItems": 0}, "[1]"),
        "minLength": ({"minLength": 1}, '""'), "maxLength": ({"maxLength": 1}, '"ab"'),
        "pattern": ({"pattern": "^a$"}, '"b"'), "format": ({"format": "date"}, '"b"'),
        "minimum": ({"minimum": 2}, "1"), "maximum": ({"maximum": 2}, "3"),
        "exclusiveMinimum": ({"exclusiveMinimum": 2}, "2"), "exclusiveMaximum": ({"exclusiveMaximum": 2}, "2"),
        "multipleOf": ({"multipleOf": 2}, "3"), "allOf": ({"allOf": [{"type": "null"}]}, "1"),
        "anyOf": ({"anyOf": [{"type": "null"}]}, "1"), "oneOf": ({"oneOf": [{"type": "null"}]}, "1"),
        "$ref": ({"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"}, "1"),
    }  # fmt: skip
    assert examples.keys() == ENFORCED
    for name, (value, output) in examples.items():
        assert not accepts(schema(value), output), name
        assert accepts(schema(True), output), name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stop": {"min_new_tokens": 1}}, "stop.min_new_tokens"),
        ({"stop": {"ignore_eos": True}}, "stop.ignore_eos"),
        ({"sampling": {"allowed_token_ids": {"ids": [1]}}}, "sampling.allowed_token_ids"),
        ({"sampling": {"banned_token_ids": [1]}}, "sampling.banned_token_ids"),
    ],
)
def test_fields_that_would_leave_no_token_are_refused(fields: dict[str, object], name: str) -> None:
    request = inference_pb2.GenerateRequest(**fields)  # pyright: ignore[reportArgumentType]
    with pytest.raises(GrammarError, match=f"{name} and constraint exclude each other"):
        check_combination(request, "constraint")
    check_combination(inference_pb2.GenerateRequest(stop={"stop_strings": ["a"]}), "constraint")  # pyright: ignore[reportArgumentType]


def test_the_check_of_the_largest_constraints_is_short() -> None:
    """It runs in the front end. The bound is far above what it takes, and below that of anything but linear work."""
    begun = time.thread_time()
    for constraint in (
        Constraint(regex="(a|b)" * 13_000),
        Constraint(lark="start: " + '"a" ' * 16_000),
        schema({"enum": list(range(9_000))}),
        Constraint(json_schema='{"anyOf":[' + ",".join(["{}"] * 20_000) + "]}"),
    ):
        grammar_of(constraint)
    assert time.thread_time() - begun < 5


def growth(text: Callable[[int], Constraint], size: int) -> float:
    """How many times longer the check of four times the text takes; the shortest of several."""

    def seconds(length: int) -> float:
        found = list[float]()
        for _ in range(3):
            begun = time.thread_time()
            with suppress(GrammarError):
                grammar_of(text(length))
            found.append(time.thread_time() - begun)
        return min(found)

    return seconds(4 * size) / max(1e-4, seconds(size))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (lambda n: Constraint(regex="a{" + " " * n + "x"), 100),
        (lambda n: Constraint(regex="a{" + "9" * n), 10_000),
        (lambda n: Constraint(lark="start: a{" + " " * n + "x"), 50),
        (lambda n: Constraint(lark="start: " + "<" * n), 10_000),
        (lambda n: Constraint(lark="start: " + "a[" * n), 4_000),
        (
            lambda n: schema(
                {"anyOf": [{"$ref": f"#{i}/$defs/a"} for i in range(n)], "$defs": {"a": {"anyOf": [{}] * 10 * n}}}
            ),
            100,
        ),
        (lambda n: schema({"pattern": "[" * n}), 4_000),
        (lambda n: schema({"patternProperties": {f"^[^{''.join(map(chr, range(99, n)))}]+$": True}}), 2_000),
        (lambda n: schema({"pattern": "^" + "(?=a)" * n}), 500),
        (lambda n: schema({"pattern": "\\" * (2 * n + 1) + "[" * n}), 2_000),
        (lambda n: schema({"patternProperties": {"^" + "[a-z]{1,2}" * n + "$": True}}), 200),
        (lambda n: schema({"patternProperties": {f"^[ab]{{9}}{i}$": True for i in range(n)}, "required": ["a"]}), 40),
        (lambda n: schema({"$defs": {str(i): {"$id": f"h{i}"} for i in range(n)}, "anyOf": [{"$ref": "h0"}] * n}), 200),
    ],
)  # fmt: skip
def test_the_time_of_the_check_grows_as_the_text_does(text: Callable[[int], Constraint], size: int) -> None:
    # The event loop waits meanwhile, and so do all streams.
    assert growth(text, size) < 10


def test_a_schema_inside_patterns_inside_each_other_stays_small() -> None:
    """Each pattern becomes 26 properties; they share one definition."""
    value: dict[str, object] = {"type": "null"}
    for _ in range(15):
        value = {"patternProperties": {"^[a-z]$": value}}
    assert len(grammar_of(schema(value))) < 20_000
