"""Names of objects: no object of an output has one twice, even if a model prefers it, and a new one stays possible."""

import itertools
import json
import random
from collections.abc import Callable
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
from tandem.v1.constraint_pb2 import Constraint

from gpu_worker.constraints.matchers import FollowedRow, Matchers
from gpu_worker.constraints.names import TokenTexts
from scheduler_svc.frontend.constraints.grammar import grammar_of, json_grammar
from tests.gpu_worker.constraints.rig import EOS, TOKENS, VOCAB_SIZE, bits, own_tokenizer, text_of

# Beside the rig's: tokens that hold the end of a name and the begin of the next, and a whole name.
EXTRA = [b'a"', b'": 1', b', "a"', b', "', b'a": 1, "a"', b'"a"', b'1, "']

ALL = [*TOKENS, b"", *EXTRA]
STARTS = itertools.count(1)


class Own:
    """A tokenizer with the rig's tokens and `EXTRA`, as llguidance calls it."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id, self.special_token_ids = EOS, None, [EOS]
        self.tokens = ALL

    def __call__(self, text: bytes) -> list[int]:
        return [TOKENS.index(bytes([byte])) for byte in text]


def matchers() -> Matchers:
    own = Own()
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(own), n_vocab=len(own.tokens))
    return Matchers(tokenizer, eos_token_ids=[EOS])


def ids_of(text: str) -> list[int]:
    """In tokens of one byte."""
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]


def row_of(found: Matchers, grammar: str, start: int) -> FollowedRow:
    found.define(1, found.compiled(grammar.encode()))
    return found.row(1, start, 1)


def allowed(found: Matchers, row: FollowedRow) -> list[int]:
    words = np.zeros(-(-len(ALL) // 32), np.int32)
    found.fill(row, words.ctypes.data)
    return bits(words)


def output(found: Matchers, schema: object, choose: Callable[[list[bytes]], int], most: int = 400) -> bytes | None:
    """The output of a row: `choose` takes each token from the allowed ones. None if it has not ended by itself."""
    row = row_of(found, json_grammar("schema", json.dumps(schema)), next(STARTS))
    text = b""
    for _ in range(most):
        if found.is_complete(row):
            return text
        tokens = allowed(found, row)
        assert tokens, f"no token after {text!r} of {schema}"
        token = tokens[choose([ALL[one] for one in tokens])]
        if token == EOS:
            return text
        text += ALL[token]
        found.take(row, [token])
    return None


SCHEMAS = {
    "free": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 3, "maxProperties": 6},
    "beside a listed one": {
        "type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"enum": [1]},
    },
    "of a pattern": {
        "type": "object", "patternProperties": {"^[ab]+$": {"enum": [1]}}, "additionalProperties": False,
        "minProperties": 4, "maxProperties": 9,
    },
    "of few letters": {
        "type": "object", "patternProperties": {"^[ab]{6,7}$": {"enum": [1]}}, "additionalProperties": False,
        "minProperties": 8, "maxProperties": 60,
    },
    "inside each other": {
        "type": "object", "minProperties": 2, "maxProperties": 3,
        "additionalProperties": {
            "type": "object", "additionalProperties": {"enum": [1, "a"]}, "minProperties": 2, "maxProperties": 3,
        },
    },
    "in a list": {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "object", "maxProperties": 3}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_object_has_a_name_twice(name: str) -> None:
    """A model that likes `a`, quotes and commas writes the same names again and again."""
    found, num_ended = matchers(), 0
    for seed in range(40):
        draw = random.Random(seed)

        def choose(texts: list[bytes], draw: random.Random = draw) -> int:
            liked = [i for i, text in enumerate(texts) if text and set(text) <= set(b'ab": 1,}')]
            return draw.choice(liked if liked and draw.random() < 0.97 else range(len(texts)))

        text = output(found, SCHEMAS[name], choose)
        if text is None:
            continue
        num_ended += 1
        for pairs in objects(text.decode()):
            assert len(set(pairs)) == len(pairs), text
    assert num_ended > 20


FEW = {"type": "object", "patternProperties": {"^[a-c]{4}$": {"enum": [1]}}, "additionalProperties": False}


def test_a_name_never_begins_where_all_that_follow_are_taken() -> None:
    """Also if all letters before lead to names that are taken, and if a name is a listed one."""
    found = matchers()
    for more in ({}, {"required": ["aaaa"]}):
        row = row_of(found, json_grammar("schema", json.dumps({**FEW, **more})), len(more))
        text = "{" + "".join(f'"{name}": 1, ' for name in ("aaaa", "aaab", "aaac", "aaba", "aaca")) + '"aa'
        found.take(row, ids_of(text))
        assert {ALL[one] for one in allowed(found, row)} == {b"b", b"c"}


L = "abc"


def test_an_object_that_has_all_names_of_a_pattern_ends() -> None:
    """Beside names that need not come too, which llguidance does not count."""
    beside = {"properties": {"z": {"enum": [1]}}, "patternProperties": {r"^[[ab]&&[abc]]{1,2}$": {"enum": [1]}}}
    every = ("a", "b", "aa", "ab", "ba", "bb")
    for schema, listed in (
        ({**FEW, "properties": {"z": {"enum": [1]}}}, [f"{a}{b}{c}{d}" for a in L for b in L for c in L for d in L]),
        ({**FEW, **beside, "properties": {}}, every),
    ):
        found = matchers()
        row = row_of(found, json_grammar("schema", json.dumps(schema)), 1000 + len(listed))
        for used, may_go_on in ((listed[:-1], True), (listed[-1:], False)):
            text = ("{" if may_go_on else ", ") + ", ".join(f'"{name}": 1' for name in used)
            found.take(row, ids_of(text))
            texts = {ALL[one] for one in allowed(found, row)}
            assert b"}" in texts and (b"," in texts) == (b', "' in texts) == may_go_on, texts


LARK = 'start: "call " /[a-z]+/ " " %json {"type": "object", "additionalProperties": {"enum": [1, "{"]}} /[^{\\["]*/'


def test_names_in_a_grammar_of_a_caller_are_kept_apart() -> None:
    found = matchers()
    row = row_of(found, grammar_of(Constraint(lark=LARK)), 2000)
    found.take(row, ids_of('call f {"a":"{","b": 1, "a'))
    texts = {ALL[one] for one in allowed(found, row)}
    assert b'"' not in texts and b"a" in texts


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"minProperties": 81}, {"required": ["aaaa"], "maxProperties": 90}])
def test_an_object_may_use_up_the_names_of_a_pattern(more: dict[str, object]) -> None:
    """A model that always goes on gets to the end of the object all the same."""
    draw = random.Random(1)

    def choose(texts: list[bytes]) -> int:
        others = [i for i, text in enumerate(texts) if b"}" not in text and text]
        return draw.choice(others or list(range(len(texts))))

    text = output(matchers(), {**FEW, **more}, choose, 2_000)
    assert text is not None and len(json.loads(text)) == 81


def objects(text: str) -> list[list[str]]:
    found: list[list[str]] = []

    def keep(pairs: list[tuple[str, object]]) -> None:
        found.append([name for name, _ in pairs])

    json.loads(text, object_pairs_hook=keep)
    return found


def test_the_same_name_in_another_object_is_no_repetition() -> None:
    wanted = b'[{"a": 1}, {"a": 1}]'
    schema = {"type": "array", "items": {"type": "object", "additionalProperties": {"enum": [1]}}}

    def choose(texts: list[bytes]) -> int:
        choose.text = getattr(choose, "text", b"")  # type: ignore[attr-defined]
        best = max((t for t in texts if t and wanted[len(choose.text) :].startswith(t)), key=len, default=b"")  # type: ignore[attr-defined]
        choose.text += best  # type: ignore[attr-defined]
        return texts.index(best)

    assert output(matchers(), schema, choose, len(wanted)) in (None, wanted)
    assert choose.text == wanted  # type: ignore[attr-defined]


def test_tokens_are_found_by_how_they_begin() -> None:
    pieces = [b"a", b"a\xff", b"a\xff\xff\xff\xff", b"ab", b"b", b"\xff\xff\x00"]
    tokenizer = Mock(vocab_size=len(pieces), is_special_token=lambda _: False, decode_bytes=lambda ids: pieces[ids[0]])
    texts = TokenTexts(tokenizer)
    for begin in (b"a", b"a\xff", b"\xff", b"c"):
        expected = [id_ for id_, piece in enumerate(pieces) if piece.startswith(begin)]
        assert sorted(texts.beginning_with(begin)) == expected


def test_rows_without_free_names_are_not_followed() -> None:
    found = Matchers(own_tokenizer(), eos_token_ids=[EOS])
    for schema, is_followed in (({"type": "object", "additionalProperties": False}, False), ({}, True)):
        row = row_of(found, json_grammar("schema", json.dumps(schema)), id(schema))
        assert (row.names is not None) == is_followed
    assert len(TOKENS) < VOCAB_SIZE and text_of([EOS]) == ""
