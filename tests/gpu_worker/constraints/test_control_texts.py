"""Literals that contain the text of a control token: served exactly, from ordinary tokens, and no end before the end.

The sampler leans to control tokens as far as the masks allow, so a mask that lets one in fails the test.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from tandem.v1 import constraint_pb2
from tokenizers import Tokenizer

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.frames import Sizes
from gpu_worker.constraints.rows import Fate
from scheduler_svc.constraint_trial import Trial
from scheduler_svc.frontend.chat.conversation import Calls, Choice, Tool
from scheduler_svc.frontend.chat.forms import CallFormat
from scheduler_svc.frontend.constraints.answer_grammar import AnswerFormat, answer_grammar
from scheduler_svc.frontend.constraints.grammar import WrittenSchemas, grammar_of
from tandem_contract.grammars import constraint_tokenizer
from tests.bundled_recipe.evaluate import MODEL_DIR
from tests.gpu_worker.constraints.rig import hash_of, prepare
from tests.gpu_worker.constraints.test_schemas import EOS, VOCAB, Sampler
from tests.rigs.byte_tokenizer import byte_characters, byte_level_json

MOST_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A tokenizer, its EOS tokens, and the texts of its control tokens by their ids."""

    tokenizer_json: bytes
    eos: tuple[int, ...]
    controls: Mapping[int, str]


def bundled() -> Model:
    tokenizer_json = (MODEL_DIR / "tokenizer.json").read_bytes()
    added = json.loads(tokenizer_json)["added_tokens"]
    return Model(
        tokenizer_json=tokenizer_json, eos=(EOS, 4097), controls={each["id"]: each["content"] for each in added}
    )


def invented() -> Model:
    """Control tokens in other forms, and EOS tokens that are special, not special, and an ordinary piece of text."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"STOP", b"<|", b"|>", b"[IN", b"ST]"]
    characters = byte_characters()
    vocab = {"".join(characters[byte] for byte in piece): token for token, piece in enumerate(pieces)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    forms = {"<eos>": True, "</s>": False, "[INST]": True, "<think>": False, "<｜end▁of▁text｜>": True, "‹x›": True}
    added = [
        {"id": len(pieces) + i, "content": text, "special": is_special, **flags}
        for i, (text, is_special) in enumerate(forms.items())
    ]
    ids = {each["content"]: each["id"] for each in added}
    # No added token, but the end: as in models with a word as EOS.
    stop = 256
    controls = {token: text for text, token in ids.items()} | {stop: "STOP"}
    return Model(tokenizer_json=byte_level_json(vocab, added), eos=(ids["<eos>"], ids["</s>"], stop), controls=controls)


MODELS = {"bundled": bundled, "invented": invented}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A grammar, and what its only outputs are."""

    name: str
    grammar: str
    outputs: tuple[str, ...]


def _json(schema: object) -> str:
    return grammar_of(constraint_pb2.Constraint(json_schema=json.dumps(schema)))


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tool_grammar(text: str) -> str:
    parameters: dict[str, Any] = {
        "type": "object", "properties": {"x": {"const": text}}, "required": ["x"], "additionalProperties": False,
    }  # fmt: skip
    form = AnswerFormat(
        calls=CallFormat(call_begin="CALL ", middle=" WITH ", call_end=" END", trigger="CALL "),
        reasoning=None,
        write_schema=WrittenSchemas(),
    )
    choice = Choice(calls=Calls.EXACTLY_ONE, tools=(Tool(name="f", parameters=parameters, is_strict=True),))
    made = answer_grammar(choice, form, "", content=None)
    assert made is not None
    return made


# From a literal to a grammar and its outputs.
KINDS: dict[str, Callable[[str], tuple[str, tuple[str, ...]]]] = {
    "const": lambda text: (_json({"const": text}), (_dumped(text),)),
    "enum": lambda text: (_json({"enum": [text, text + "!", 7]}), (_dumped(text), _dumped(text + "!"), "7")),
    "key": lambda text: (
        _json(
            {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
        ),
        (_dumped({text: 1}),),
    ),
    "pattern": lambda text: (_json({"type": "string", "pattern": f"^{_pattern(text)}$"}), (_dumped(text),)),
    "regex": lambda text: (
        grammar_of(constraint_pb2.Constraint(regex=_pattern(text) + "(x|y)")),
        (text + "x", text + "y"),
    ),
    "choice": lambda text: (
        grammar_of(constraint_pb2.Constraint(choices={"choices": [text, "z" + text]})),  # pyright: ignore[reportArgumentType]
        (text, "z" + text),
    ),
    "lark": lambda text: (
        grammar_of(constraint_pb2.Constraint(lark=f"start: {_dumped(text)} tail\ntail: /[0-9]/")),
        tuple(f"{text}{digit}" for digit in range(10)),
    ),
    "tool": lambda text: (_tool_grammar(text), (f"CALL f WITH {_dumped({'x': text})} END",)),
}
PLACES = ("{}", "{}b", "a{}b", "a{}", "a{}{}")


def _pattern(text: str) -> str:
    return "".join(f"\\{char}" if char in r"|[]<>/().*+?{}^$\\" and char not in "<>/" else char for char in text)


def cases(model: Model) -> Iterator[Case]:
    for control in model.controls.values():
        for place in PLACES:
            literal = place.format(control, control)
            for kind, make in KINDS.items():
                grammar, outputs = make(literal)
                yield Case(name=f"{kind} of {literal}", grammar=grammar, outputs=outputs)


class LeaningSampler(Sampler):
    """Prefers control tokens to all others that the masks allow."""

    def __init__(self, tokenizer: Tokenizer, controls: Mapping[int, str]) -> None:
        super().__init__(tokenizer, 3)
        self._lean = torch.zeros(VOCAB)
        self._lean[list(controls)] = 50.0


def _run(model: Model, every: list[Case]) -> dict[str, tuple[Fate, list[int], str]]:
    """The fate, the tokens and the failure of each case, each in a row of its own."""
    sizes = Sizes(max_rows=len(every), vocab_size=VOCAB, max_length=MOST_TOKENS)
    sampler = LeaningSampler(Tokenizer.from_str(model.tokenizer_json.decode()), model.controls)
    tokens = {row: list[int]() for row in range(1, len(every) + 1)}
    with closing(Constraints(model.tokenizer_json, sizes, model.eos)) as constraints:
        answers = prepare(constraints, *{case.grammar for case in every})
        assert set(answers.values()) == {""}, {case.name: answers[case.grammar] for case in every}
        for row, case in enumerate(every, 1):
            constraints.start(row, hash_of(case.grammar), np.zeros(0, np.int32))
        for _ in range(MOST_TOKENS):
            rows = [own for own in map(constraints.row, tokens) if own.fate is Fate.OPEN]
            if not rows:
                break
            masks = np.zeros((len(rows), sizes.mask_words), np.int32)
            constraints.masks(rows, masks)
            chosen = sampler.tokens(masks)
            for own, token in zip(rows, chosen, strict=True):
                tokens[own.row].append(token)
            constraints.learn(zip(rows, chosen, strict=True))
        found = [constraints.row(row) for row in tokens]
        return {case.name: (own.fate, tokens[own.row], own.detail) for case, own in zip(every, found, strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_a_literal_with_the_text_of_a_control_token_is_served_exactly(name: str) -> None:
    model = MODELS[name]()
    every = list(cases(model))
    decode = Tokenizer.from_str(model.tokenizer_json.decode()).decode
    wrong = list[str]()
    for case, (fate, tokens, detail) in zip(every, _run(model, every).values(), strict=True):
        if tokens[-1] in model.eos:
            tokens = tokens[:-1]
        text = decode(tokens, skip_special_tokens=False)
        is_right = fate in (Fate.COMPLETE, Fate.ENDED) and text in case.outputs
        if not is_right or not model.controls.keys().isdisjoint(tokens):
            wrong.append(f"{case.name}: {fate.name} {text!r} {detail}")
    assert len(every) > 200 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", MODELS)
def test_a_trial_takes_every_such_literal(name: str) -> None:
    model = MODELS[name]()
    trial = Trial(constraint_tokenizer(model.tokenizer_json.decode(), VOCAB, model.eos), model.eos)
    refused = {case.name: why for case in cases(model) if (why := trial.refusal(case.grammar))}
    assert not refused


@pytest.mark.parametrize(
    ("grammar", "outputs"),
    [
        ('start: "a" <|endoftext|> "b"', None),
        ('start: "a" <|endoftext|> ("b")?', ["a"]),
        ('start: "a" <|endoftext|>', ["a"]),
        ('start: "a" (<|endoftext|> "b" | "c")', ["ac"]),
        ('start: "a" <|im_start|> "b"', ["a<|im_start|>b"]),
    ],
)
def test_eos_in_a_grammar_counts_only_where_it_completes_the_output(grammar: str, outputs: list[str] | None) -> None:
    """Other control tokens that a grammar names are tokens of the output."""
    model = bundled()
    trial = Trial(constraint_tokenizer(model.tokenizer_json.decode(), VOCAB, model.eos), model.eos)
    if outputs is None:
        assert trial.refusal(grammar) == "no token of the model may come as output token 2"
    else:
        assert trial.refusal(grammar) == ""
        case = Case(name="", grammar=grammar, outputs=tuple(outputs))
        fate, tokens, _ = _run(model, [case])[""]
        assert fate in (Fate.COMPLETE, Fate.ENDED)
        kept = [token for token in tokens if token not in model.eos]
        assert Tokenizer.from_str(model.tokenizer_json.decode()).decode(kept, skip_special_tokens=False) in outputs


def test_other_texts_have_the_tokens_of_the_model() -> None:
    model = bundled()
    ours = constraint_tokenizer(model.tokenizer_json.decode(), VOCAB, model.eos)
    plain = llguidance.LLTokenizer(model.tokenizer_json.decode(), n_vocab=VOCAB, eos_token=list(model.eos))
    for text in ("Once upon a time, there was a little girl.", '{"name": "Zoë", "n": [1, 2.5]}', " < | > 日本 😀\n\n"):
        assert ours.tokenize_str(text) == plain.tokenize_str(text)
