"""The special tokens that a tokenizer adds to a text: with and without them, and of texts that bring their own."""

import asyncio

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler_svc.frontend.text import tokenizer
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, EOS, as_json, with_special_tokens

FORMS = ("$A", f"{BOS} $A", f"$A {EOS}", f"{BOS} $A {EOS}", f"{BOS} {EOS} $A")
TEXTS = ("hi", "the é😀", " a", f"a{BOS}b", "a" * 5000)


def encode(form: str, text: str, *, add_special_tokens: bool) -> list[int]:
    made = with_special_tokens(form)
    served = Tokenizer(as_json(made), vocab_size=made.get_vocab_size())
    try:
        return asyncio.run(served.encode(text, "", add_special_tokens=add_special_tokens))
    finally:
        served.threads.close()


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_ids_are_those_of_transformers(form: str, adds: bool) -> None:
    truth = PreTrainedTokenizerFast(tokenizer_object=with_special_tokens(form))
    for text in TEXTS:
        ids = encode(form, text, add_special_tokens=adds)
        assert ids == truth(text, add_special_tokens=adds)["input_ids"]


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_a_text_brings_are_not_doubled(form: str) -> None:
    begin = form.partition("$A")[0].replace(" ", "")
    for text in TEXTS:
        once = encode(form, text, add_special_tokens=True)
        assert encode(form, begin + text, add_special_tokens=True) == once
        if begin:
            # Two that the text brings itself are two.
            twice = encode(form, begin + begin + text, add_special_tokens=True)
            num = len(with_special_tokens("$A").encode(begin).ids)
            assert twice == once[:num] + once


def test_texts_in_threads_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "INLINE_CHARS", 0)
    form = f"{BOS} $A"
    assert encode(form, f"{BOS}hi", add_special_tokens=True) == encode(form, "hi", add_special_tokens=True)
    assert encode(form, "hi", add_special_tokens=False) == list(b"hi")
