"""Incremental decoding: no text is lost, duplicated or returned too early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from scheduler_svc.frontend.text.detokenize import MAX_HELD_TOKENS, Detokenizer
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, byte_level, sentencepiece_like, spell, token

TOKENIZER = byte_level()
NUM_IDS = TOKENIZER.get_vocab_size()


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def pieces(batches: list[list[int]], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.push(batch) for batch in batches), detokenizer.finish()]


# The tokens in batches, the prompt, and the text of each batch and of the end.
PIECES: dict[str, tuple[list[list[int]], list[int], list[str]]] = {
    "an incomplete character at the end": ([[ord("a")], [0xE2], [0x82]], [], ["a", "", "", "\ufffd"]),
    "an invalid byte before the next character": ([[0x80], [ord("a")]], [], ["", "\ufffda", ""]),
    "a special token inside a character": ([[0xC3], [TOKENIZER.token_to_id(BOS)], [0xA9]], [], ["", "", "é", ""]),
    "after a prompt that ends inside a character": (
        [[0x82, 0xAC], [ord("a")]], [ord("x"), 0xE2], ["", "\ufffd\ufffda", ""]
    ),
    "the prompt is not shown": ([[ord("b")]], spell(b"the prompt"), ["b", ""]),
    "a merged token counts as its bytes": ([[token("the")], [token("€")]], [], ["the", "€", ""]),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_text_comes_with_the_token_that_makes_it_certain(name: str):
    batches, context, expected = PIECES[name]
    assert pieces(batches, tuple(context)) == expected


def test_a_second_finish_returns_no_text():
    detokenizer = Detokenizer(decode)
    detokenizer.push([0xC3])
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]


def test_at_most_max_held_tokens_of_invalid_bytes_wait_for_a_character():
    detokenizer, num_shown = Detokenizer(decode), 0
    for num_pushed in range(1, 200):
        num_shown += len(detokenizer.push([0x80]))
        assert num_pushed - num_shown <= MAX_HELD_TOKENS
    assert num_shown + len(detokenizer.finish()) == 199


@pytest.mark.parametrize("tail", ["é", "€", "😀"])
def test_a_character_after_many_invalid_bytes_is_whole(tail: str):
    for num_invalid in range(MAX_HELD_TOKENS - 4, MAX_HELD_TOKENS + 5):
        tokens = [0x80] * num_invalid + spell(tail.encode())
        assert "".join(pieces([[t] for t in tokens])) == "\ufffd" * num_invalid + tail


# Half of the ids are bytes that begin or continue characters, so invalid sequences are common.
ids = st.integers(0, NUM_IDS - 1) | st.integers(0x80, 0xFF) | st.sampled_from([*"é€😀".encode()])


@given(st.lists(st.lists(ids, max_size=5), max_size=30))
def test_concatenated_pieces_equal_the_whole_decode(batches: list[list[int]]):
    whole = decode([t for batch in batches for t in batch])
    assert "".join(pieces(batches)) == whole


@given(st.text(max_size=20), st.lists(ids, max_size=20))
def test_a_context_of_whole_characters_changes_nothing(context: str, tokens: list[int]):
    prompt = tuple(TOKENIZER.encode(context).ids[-8:])
    if decode(list(prompt)).endswith("\ufffd"):
        prompt = ()
    assert "".join(pieces([[t] for t in tokens], prompt)) == decode(tokens)


@given(st.lists(st.text(max_size=10), max_size=10))
def test_text_is_returned_no_later_than_by_the_stream_of_the_library(parts: list[str]):
    tokens = [t for part in parts for t in spell(part.encode())]
    stream, detokenizer = DecodeStream(skip_special_tokens=True), Detokenizer(decode)
    theirs = mine = ""
    for t in tokens:
        theirs += stream.step(TOKENIZER, t) or ""
        mine += detokenizer.push([t])
        assert mine.startswith(theirs)


SPACED = [" the", " cat", ""]
BYTES = ["<0xE2>", "<0x82>", "<0xAC>", "<0xC3>"]
# The output, the prompt, the token before both, and the text of each token and of the end.
FALLBACK: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "the first space after a prompt": (["▁the", "▁cat"], ["▁the"], [], SPACED),
    "the first space without a prompt is stripped": (["▁the", "▁cat"], [], [], ["the", " cat", ""]),
    "after a byte": (["▁the", "▁cat"], ["<0xE2>"], ["s"], SPACED),
    "after two bytes": (["▁the", "▁cat"], ["▁the", "<0xE2>", "<0x82>"], ["s"], SPACED),
    "after many bytes": (["▁the", "▁cat"], ["▁cat", *["<0x80>"] * 20], ["s"], SPACED),
    "one space is stripped and no more": (["▁", "▁the", "▁cat"], [], ["s"], ["", *SPACED]),
    "a character of several tokens": ([*BYTES, "<0xA9>", "s"], ["▁the"], [], ["", "", "€", "", "é", "s", ""]),
    # Text that was returned is kept if the decoder changes it.
    "an invalid run": ([*BYTES, "s", "▁cat"], ["▁the"], [], ["", "", "€", "", "\ufffds", " cat", ""]),
}


def fallback_pieces(words: list[str], context: list[str], anchor: list[str]) -> list[str]:
    tokenizer = sentencepiece_like()["llama"]
    prompt, before = ([tokenizer.token_to_id(word) for word in each] for each in (context, anchor))
    detokenizer = Detokenizer(lambda tokens: tokenizer.decode(tokens), prompt, before)
    return [*(detokenizer.push([tokenizer.token_to_id(word)]) for word in words), detokenizer.finish()]


@pytest.mark.parametrize("name", FALLBACK)
def test_decoders_of_sentencepiece_strip_the_first_space_alone(name: str):
    """One invalid byte makes its whole run invalid."""
    *given, expected = FALLBACK[name]
    assert fallback_pieces(*given) == expected


def test_after_many_invalid_bytes_the_space_is_kept():
    words = [*["<0x80>"] * 40, "▁the"]
    assert "".join(fallback_pieces(words, ["▁the"], ["s"])) == "\ufffd" * 40 + " the"
