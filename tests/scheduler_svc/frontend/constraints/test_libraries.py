"""Schemas as pydantic 2, zod 3 and 4 (toJSONSchema, zod-to-json-schema, OpenAI's helpers) and OpenAI's documentation
write them: each is served, with the values that its author means, or refused with what to write instead.

The rows of zod were made by it, in the versions that the table names; their names say the type and the options.
"""

import itertools
import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AnyUrl, Base64Bytes, BaseModel, ConfigDict, Field, Json, SecretStr, TypeAdapter

from scheduler_svc.frontend.constraints.grammar import grammar_of
from scheduler_svc.frontend.constraints.limits import GrammarError
from scheduler_svc.frontend.constraints.lowering import SAME_PATTERNS
from scheduler_svc.frontend.constraints.patterns import UnreadError, names_of, without_lookahead
from tests.scheduler_svc.frontend.constraints.rig import matcher, schema, takes

Schema = dict[str, Any]


def taken(given: Schema, values: list[object]) -> list[bool]:
    """Which values may be an output."""
    made = matcher(schema(given))
    assert not made.is_error(), made.get_error()
    return [takes(made, json.dumps(value, ensure_ascii=False)) for value in values]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(default=9, ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list["Dog"] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"a": 1}, "x-order": 1})
    a: Annotated[int, Field(examples=[1], deprecated=True, title="A")]


TREE = {"kind": "dog", "friends": [{"kind": "dog", "friends": []}]}
PYDANTIC: list[tuple[Any, list[object], list[object]]] = [
    (Cat, [{"kind": "cat", "lives": 3}, {"kind": "cat"}], [{"kind": "dog"}, {"kind": "cat", "lives": 10}]),
    (Annotated[Cat | Dog, Field(discriminator="kind")], [{"kind": "cat"}, TREE], [{"kind": "cow"}]),
    (Strict, [{"a": 1}], [{"a": 1, "b": 2}]),
    (Decimal, [1.5, "1.5"], [None]),
    (Annotated[Decimal, Field(max_digits=5, decimal_places=2, gt=0)], [1.5, "7"], [-1.5, 0]),
    (dict[str, int], [{}, {"b": 1, "a": 2}], [{"a": "x"}]),
    (dict[Literal["x", "y"], int], [{}, {"x": 1, "y": 2}, {"y": 1}], [{"z": 1}]),
    (dict[Annotated[str, Field(pattern="^a+$")], int], [{"aa": 1}], [{"aa": "x"}]),
    (dict[int, str], [{"1": "a"}], [{"1": 2}]),
    (tuple[int, str], [[1, "a"]], [[1], ["a", 1]]),
    (list[int] | None, [None, [1]], ["a"]),
    (SecretStr, ["a"], [1]), (Json[int], ["1"], []), (bytes, ["a"], [1]), (Base64Bytes, ["YQ=="], [1]),
    (AnyUrl, ["https://example.com/a"], ["no url"]),
    (Annotated[float, Field(gt=0, lt=0.5)], [0.25], [0, 0.5, -1]),
    (Annotated[float, Field(multiple_of=0.01)], [0.07], [0.001]),
    (Annotated[list[str], Field(min_length=1, max_length=2)], [["a"]], [[], ["a", "b", "c"]]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "good", "bad"), PYDANTIC)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_schemas_of_pydantic(kind: Any, good: list[object], bad: list[object], mode: Any) -> None:
    given = TypeAdapter(kind).json_schema(mode=mode)
    if mode == "validation":
        assert taken(given, good) == [True] * len(good)
    assert taken(given, bad) == [False] * len(bad)


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
TABLES = json.loads((Path(__file__).parent / "schemas_of_libraries.json").read_text())


@pytest.mark.parametrize("row", TABLES["served"], ids=lambda row: row["name"])
def test_schemas_of_zod_and_of_openai(row: dict[str, Any]) -> None:
    good, bad = row["good"], row["bad"]
    assert taken(row["schema"], [*good, *bad]) == [True] * len(good) + [False] * len(bad)


def test_what_says_nothing_makes_no_other_grammar() -> None:
    """So such schemas share one trial and one compilation."""
    said: Schema = dict.fromkeys(("title", "description", "$comment", "contentMediaType", "id", "$anchor"), "a")
    said |= dict.fromkeys(("deprecated", "readOnly", "writeOnly"), True)
    said |= {name: {} for name in ("discriminator", "externalDocs", "xml", "contentSchema")}
    said |= {"default": 1, "examples": [1], "example": 2, "x-a": {"b": 1}, "x-guidance": {"lenient": True}}
    said |= {"contentEncoding": "base64", "format": "password", "nullable": False, "uniqueItems": False}
    said |= {"propertyNames": {"type": "string"}, "additionalItems": {"type": "null"}, "minProperties": 0}
    said |= {"$id": "https://e.x/a"}
    plain = {"type": ["object", "string", "array"], "additionalProperties": {"type": "integer"}}
    assert grammar_of(schema({**plain, **said})) == grammar_of(schema(plain))


@pytest.mark.parametrize("row", TABLES["refused"], ids=lambda row: row["name"])
def test_a_refusal_names_the_place_and_what_to_write_instead(row: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as refused:
        grammar_of(schema(row["schema"]))
    text = str(refused.value)
    assert row["words"] in text and text.startswith("constraint.json_schema") and "\n" not in text
    assert text.startswith(refused.value.field)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?=.*a)(?=.{2,3}$)[ab]+", "^(?=a|b)c*", "^(?=a)b|a", "^(?=a)?b", "(?=a)b", "^(?=a", "^(?=(a|b)c?)[a-c]{2}$",
        "^a(?=b)",
        "^(?=[(]|a)a", "^(?=a$)", r"^(?=\)|a)[a)]",
    ],
)  # fmt: skip
def test_patterns_without_lookahead_match_together_the_same(pattern: str) -> None:
    found, letters = without_lookahead(pattern), ["", "a", "b", "c", ")", "("]
    if found == [pattern]:
        assert pattern in ("^(?=a)b|a", "^(?=a)?b", "(?=a)b", "^(?=a", "^a(?=b)")
        return
    assert not any("(?=" in one for one in found)
    for text in ("".join(some) for some in itertools.product(letters, repeat=4)):
        assert all(re.search(one, text) for one in found) == (re.search(pattern, text) is not None), (found, text)


@pytest.mark.parametrize("pattern", [DECIMAL, EMAIL, DURATION])
def test_patterns_without_lookaround_match_the_same(pattern: str) -> None:
    draw, same = random.Random(3), re.compile(SAME_PATTERNS[pattern], re.ASCII)
    letters = {DECIMAL: "+-.01", EMAIL: "a'.@-Z", DURATION: "PT1W.YMDHS"}[pattern]
    number = 0
    for _ in range(20_000):
        text = "".join(draw.choices(letters, k=draw.randint(0, 9)))
        if pattern == EMAIL and draw.random() < 0.7:
            text += "@a.bc"
        if pattern == DURATION:
            text = "P" + text
        is_match = re.search(pattern, text, re.ASCII) is not None
        assert (same.search(text) is not None) == is_match, text
        number += is_match
    assert number > 15


def test_names_of_a_pattern_are_those_that_it_matches() -> None:
    """Against Python's own matcher, for all short texts."""
    letters = "ab1-"
    texts = [""]
    for _ in range(4):
        texts += [text + letter for text in texts[-(4 ** (len(texts[-1]))) :] for letter in letters]
    draw, num_few = random.Random(5), 0
    parts = ["a", "b", "[ab]", "[a-b1]", "(a|b1)", "(?:a|)", "1?", "b{2}", "a{1,2}", r"\-", "(a|b)?", "[^a]", "a*"]
    parts += [".", r"\w"]
    for _ in range(1_000):
        body = "".join(draw.choices(parts, k=draw.randint(1, 3)))
        pattern = draw.choice(("^{}$", "^{}$", "^{}", "{}$", "^{}$|^b$")).format(body)
        matched = {text for text in texts if re.search(pattern, text)}
        try:
            names = names_of(pattern, 16)
        except UnreadError:
            continue
        if names is None:
            continue
        num_few += 1
        assert {name for name in names if len(name) <= 4} == matched, pattern
    assert num_few > 150
