"""Incremental decoding: no text is lost, duplicated or returned too early."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from scheduler_svc.frontend.text.detokenize import MAX_HELD_TOKENS, Detokenizer
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, byte_fallback, byte_level, spell, token

TOKENIZER = byte_level()
NUM_IDS = TOKENIZER.get_vocab_size()


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def pieces(batches: list[list[int]], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.push(batch) for batch in batches), detokenizer.finish()]


def test_an_incomplete_character_at_the_end_is_returned_as_a_replacement_character():
    assert pieces([[ord("a")], [0xE2], [0x82]]) == ["a", "", "", "\ufffd"]


def test_an_invalid_byte_is_shown_once_the_next_character_is_known():
    assert pieces([[0x80], [ord("a")]]) == ["", "\ufffda", ""]


def test_a_special_token_inside_a_character_is_skipped():
    bos = TOKENIZER.token_to_id(BOS)
    assert pieces([[0xC3], [bos], [0xA9]]) == ["", "", "é", ""]


def test_a_prompt_that_ends_inside_a_character_gives_no_context():
    assert pieces([[0x82, 0xAC], [ord("a")]], context=(ord("x"), 0xE2)) == ["", "\ufffd\ufffda", ""]


def test_the_prompt_is_not_shown():
    assert pieces([[ord("b")]], context=tuple(spell(b"the prompt"))) == ["b", ""]


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


class TestByteFallback:
    """SentencePiece's decoders strip the first space, and one invalid byte makes its whole run invalid."""

    def pieces(self, words: list[str], context: list[str], anchor: Sequence[str] = ()) -> list[str]:
        tokenizer = byte_fallback()
        prompt, before = ([tokenizer.token_to_id(word) for word in each] for each in (context, anchor))
        detokenizer = Detokenizer(lambda tokens: tokenizer.decode(tokens), prompt, before)
        return [*(detokenizer.push([tokenizer.token_to_id(word)]) for word in words), detokenizer.finish()]

    def test_after_a_prompt_the_first_space_is_kept(self):
        assert self.pieces(["▁the", "▁cat"], context=["▁the"]) == [" the", " cat", ""]

    def test_without_a_prompt_the_decoder_strips_the_first_space(self):
        assert self.pieces(["▁the", "▁cat"], context=[]) == ["the", " cat", ""]

    @pytest.mark.parametrize("prompt", [["<0xE2>"], ["▁the", "<0xE2>", "<0x82>"], ["▁cat", *["<0x80>"] * 20]])
    def test_after_a_prompt_that_ends_inside_a_character_the_first_space_is_kept(self, prompt: list[str]):
        assert self.pieces(["▁the", "▁cat"], context=prompt, anchor=["s"]) == [" the", " cat", ""]

    def test_the_decoder_strips_one_space_and_no_more(self):
        assert self.pieces(["▁", "▁the", "▁cat"], context=[], anchor=["s"]) == ["", " the", " cat", ""]

    def test_after_many_invalid_bytes_the_space_is_kept(self):
        words = [*["<0x80>"] * 40, "▁the"]
        assert "".join(self.pieces(words, context=["▁the"], anchor=["s"])) == "\ufffd" * 40 + " the"

    def test_a_character_of_several_byte_tokens_is_returned_whole(self):
        assert self.pieces(["<0xE2>", "<0x82>", "<0xAC>", "<0xC3>", "<0xA9>", "s"], context=["▁the"]) == [
            "", "", "€", "", "é", "s", "",
        ]  # fmt: skip

    def test_text_that_was_returned_is_kept_if_the_decoder_changes_it(self):
        words = ["<0xE2>", "<0x82>", "<0xAC>", "<0xC3>", "s", "▁cat"]
        assert self.pieces(words, context=["▁the"]) == ["", "", "€", "", "\ufffds", " cat", ""]


def test_a_merged_token_counts_as_its_bytes():
    assert pieces([[token("the")], [token("€")]]) == ["the", "€", ""]
