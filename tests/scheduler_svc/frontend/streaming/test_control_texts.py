"""Answers with a grammar: text of ordinary tokens that reads like a control token is text, and the token is a mark."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLTokenizer
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2

from scheduler_svc.frontend.chat.answer import ChatOutput
from scheduler_svc.frontend.chat.forms import choose_form
from scheduler_svc.frontend.streaming.samples import make_outputs
from scheduler_svc.frontend.text.output import OutputPiece
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tandem_contract.grammars import constraint_tokenizer
from tests.architecture.source import ROOT
from tests.scheduler_svc.frontend.chat.test_stops import joined

TOKENIZER_JSON = (ROOT / "gpu_worker/bundled/model/tokenizer.json").read_bytes()
CONTROLS = {each["content"]: each["id"] for each in json.loads(TOKENIZER_JSON)["added_tokens"]}
VOCAB, EOS = 4112, 4095
LITERALS = [place.format(text) for text in CONTROLS for place in ("{}", "a{}", "{}b", "a{0}{0}b")]


@pytest.fixture(scope="module")
def ordinary() -> LLTokenizer:
    return constraint_tokenizer(TOKENIZER_JSON.decode(), VOCAB, [EOS])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER_JSON, vocab_size=VOCAB)


def output(tokenizer: Tokenizer, *, skips: bool = True, stop: str = "", has_grammar: bool = True) -> ChatOutput:
    """The output of one chat of the family hermes."""
    form = choose_form(["<tool_call>", '"arguments"'], "", None) or choose_form(['<tool_call> "arguments"'], "", None)
    assert form is not None and form.family == "hermes"
    description = frontend_pb2.StreamDescription(
        accepted=inference_pb2.Accepted(request_id="r", sampling=inference_pb2.SamplingParams(num_samples=1)),
        want_text=True,
        skip_special_tokens=skips,
        chat=frontend_pb2.ChatParsing(response_template_json=json.dumps(form.template), marks_are_tokens=has_grammar),
    )
    if stop:
        description.stop.stop_strings.append(stop)
    # Transformers is not needed for the ids of marks.
    chat = SimpleNamespace(renderer=SimpleNamespace(marks=CONTROLS))
    model: Any = SimpleNamespace(tokenizer=tokenizer, eos_token_ids=frozenset([EOS]), chat=chat)
    [made] = make_outputs(description, model)
    assert isinstance(made, ChatOutput)
    return made


def read(out: ChatOutput, tokens: list[int]) -> OutputPiece:
    """The whole answer, token by token."""
    return joined([*(out.push([token]) for token in tokens), out.finish([EOS], stop_token_id=EOS)])


@pytest.mark.parametrize("skips", [True, False])
def test_content_reasoning_and_calls_keep_such_texts(tokenizer: Tokenizer, ordinary: LLTokenizer, skips: bool) -> None:
    text_of = ordinary.tokenize_str
    for literal in LITERALS:
        content = json.dumps({"x": literal})
        call = f'\n{{"name": "f", "arguments": {{"x": {json.dumps(literal)}}}}}\n'
        tokens = [CONTROLS["<think>"], *text_of(literal), CONTROLS["</think>"], *text_of(content)]
        tokens += [CONTROLS["<tool_call>"], *text_of(call), CONTROLS["</tool_call>"]]
        assert not set(CONTROLS.values()) & {*text_of(literal), *text_of(content), *text_of(call)}
        found = read(output(tokenizer, skips=skips), tokens)
        assert (found.reasoning, found.text) == (literal, content)
        assert {each.name for each in found.calls if each.name} == {"f"}
        assert json.loads("".join(each.arguments for each in found.calls)) == {"x": literal}


def test_a_call_that_is_read_at_its_end_keeps_such_texts(tokenizer: Tokenizer, ordinary: LLTokenizer) -> None:
    """The order of its keys is another."""
    for literal in LITERALS:
        call = f'{{"arguments": {{"é": {json.dumps(literal)}}}, "name": "f"}}'
        tokens = [CONTROLS["<tool_call>"], *ordinary.tokenize_str(call), CONTROLS["</tool_call>"]]
        [found] = read(output(tokenizer), tokens).calls
        assert (found.name, json.loads(found.arguments)) == ("f", {"é": literal})


def test_a_stop_string_is_found_in_tokens_and_in_text(tokenizer: Tokenizer, ordinary: LLTokenizer) -> None:
    for name, control in CONTROLS.items():
        if name in ("<|endoftext|>", "<think>", "<tool_call>", "<|im_start|>", "<|im_end|>"):
            continue
        for middle in ([control], ordinary.tokenize_str(name)):
            tokens = [*ordinary.tokenize_str("one"), *middle, *ordinary.tokenize_str("two")]
            found = read(output(tokenizer, stop=f"e{name}t"), tokens)
            assert (found.text, found.stop_string) == ("on", f"e{name}t")


def test_without_a_grammar_a_mark_may_be_of_ordinary_tokens(tokenizer: Tokenizer, ordinary: LLTokenizer) -> None:
    """As models do that were not trained on the token."""
    tokens = ordinary.tokenize_str('<think>hm</think>yes<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    found = read(output(tokenizer, has_grammar=False), tokens)
    assert (found.reasoning, found.text, [call.name for call in found.calls if call.name]) == ("hm", "yes", ["f"])
    found = read(output(tokenizer), tokens)
    assert (found.reasoning, found.calls) == ("", [])
