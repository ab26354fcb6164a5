"""Pieces of text and bytes: joined they are the text with every decoder; a token's bytes are its own."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.text.detokenize import Detokenizer, Pieces
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tests.scheduler_svc.frontend.tokenizers_for_tests import (
    BOS,
    EOS,
    as_json,
    byte_level,
    sentencepiece_like,
    spell,
    token,
)

KINDS = {"bytes": byte_level(), **sentencepiece_like()}
SERVED = {name: Tokenizer(as_json(made), vocab_size=made.get_vocab_size()) for name, made in KINDS.items()}


def reader(name: str, prompt: list[int], *, skip: bool = True) -> Pieces:
    return SERVED[name].pieces(prompt, skip_special_tokens=skip)


def whole_words(name: str) -> list[list[int]]:
    """Ids of every token that is complete, and of characters in several tokens."""
    made = KINDS[name]
    ids = range(made.get_vocab_size())
    words = [[i] for i in ids if not re.fullmatch("<0x..>|<unk>", made.id_to_token(i) or "<unk>")]
    if name == "bytes":
        words = [[i] for i in ids if "\ufffd" not in made.decode([i])]
    spelled = [spell(char.encode()) for char in "é€😀"]
    if name not in ("bytes", "first"):
        spelled = [[made.token_to_id(f"<0x{byte:02X}>") or 0 for byte in char] for char in spelled]
    return [*words, *([] if name == "first" else spelled)]


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_are_the_text(name: str, data: st.DataObject, skip: bool) -> None:
    """After any prompt, and also at the start of a text, where some decoders strip white space."""
    words = st.lists(st.sampled_from(whole_words(name)), max_size=12)
    prompt = [i for word in data.draw(words) for i in word]
    output = [i for word in data.draw(words) for i in word]
    made = KINDS[name]
    text = made.decode(prompt + output, skip_special_tokens=skip)[len(made.decode(prompt, skip_special_tokens=skip)) :]
    stream = Detokenizer(
        lambda ids: made.decode(ids, skip_special_tokens=skip), prompt[-8:], SERVED[name].token_bytes.anchor
    )
    assert "".join([*(stream.push([i]) for i in output), stream.finish()]) == text
    pieces = reader(name, prompt, skip=skip)
    found = [pieces.push(i) for i in output]
    special = SERVED[name].special_tokens if skip else {}
    texts = [piece.text for piece, i in zip(found, output, strict=True) if i not in special]
    # A last U+FFFD might have become a character with more bytes.
    assert "".join([*texts, pieces.rest().text]) == text
    assert b"".join(piece.data for piece in found).decode() == text
    assert [(piece.text, piece.data) for piece, i in zip(found, output, strict=True) if i in special] == [
        (special[i], b"") for i in output if i in special
    ]


@pytest.mark.parametrize("name", [name for name in KINDS if name != "first"])
def test_the_parts_of_a_character_have_their_own_bytes(name: str) -> None:
    char = "😀".encode()
    ids = list(char) if name == "bytes" else [KINDS[name].token_to_id(f"<0x{byte:02X}>") or 0 for byte in char]
    pieces = reader(name, SERVED[name].token_bytes.anchor)
    found = [pieces.push(i) for i in ids]
    assert found == [("", char[:1]), ("", char[1:2]), ("", char[2:3]), ("😀", char[3:])]
    cut = reader(name, [])
    assert [cut.push(i) for i in ids[:2]] == [("", char[:1]), ("", char[1:2])]
    text, data = cut.rest()
    assert (set(text), data) == ({"\ufffd"}, b"")


def test_a_token_may_end_a_character_and_begin_another() -> None:
    half = token(" 😀") - 1  # a space and three of the four bytes
    pieces = reader("bytes", spell(b"a"))
    assert [pieces.push(i) for i in (half, 0x80, token("é"))] == [
        (" ", b" \xf0\x9f\x98"), ("😀", b"\x80"), ("é", "é".encode()),
    ]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_an_alternative_is_what_the_token_would_have_added(name: str, data: st.DataObject) -> None:
    ids = st.integers(0, KINDS[name].get_vocab_size() - 1)
    before, alternative = data.draw(st.lists(ids, max_size=10)), data.draw(ids)
    pieces, others = reader(name, before[:2]), reader(name, before[:2])
    for i in before[2:]:
        pieces.peek(alternative)
        assert pieces.push(i) == others.push(i)
    assert pieces.peek(alternative) == pieces.peek(alternative) == others.push(alternative)


@pytest.mark.parametrize("name", sentencepiece_like())
def test_a_word_with_its_space_and_one_without_differ(name: str) -> None:
    made = KINDS[name]
    pieces = reader(name, [made.token_to_id("a") or 0])
    assert [pieces.peek(made.token_to_id(word) or 0) for word in ("▁the", "the")] == [
        (" the", b" the"), ("the", b"the"),
    ]  # fmt: skip


async def test_detokenize_gives_the_same_pieces() -> None:
    for name, served in SERVED.items():
        ids = [i for word in whole_words(name) for i in word]
        for skip in (True, False):
            texts = await served.decode_each(ids, "", skip_special_tokens=skip)
            assert len(texts) == len(ids)
            assert "".join(texts) == await served.decode(ids, "", skip_special_tokens=skip)
    bos, eos = (KINDS["llama"].token_to_id(each) or 0 for each in (BOS, EOS))
    assert await SERVED["llama"].decode_each([bos, eos], "", skip_special_tokens=False) == [BOS, EOS]
