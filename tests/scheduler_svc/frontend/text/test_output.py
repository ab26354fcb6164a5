"""The tokens, text and end of one output. The earliest token position wins."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.output import SampleOutput, StopFinder
from tests.scheduler_svc.frontend.tokenizers_for_tests import EOS, byte_level, spell, token

TOKENIZER = byte_level()
EOS_ID = TOKENIZER.token_to_id(EOS)


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def make(
    *stops: str, include_stop: bool = False, min_new_tokens: int = 0, stop_ids: tuple[int, ...] = (EOS_ID,)
) -> SampleOutput:
    return SampleOutput(
        detokenizer=Detokenizer(decode),
        stop_finder=StopFinder(stops, include_stop=include_stop) if stops else None,
        stop_token_ids=frozenset(stop_ids),
        min_new_tokens=min_new_tokens,
        include_stop=include_stop,
    )


def test_a_stop_is_found_in_a_token_that_also_begins_a_character():
    half = token(" 😀") - 1  # a space and three of the four bytes
    assert decode([half]) == " \ufffd"
    output = make("a ")
    piece = output.push([ord("a"), half, 0x80])
    assert (piece.stop_string, piece.token_ids) == ("a ", [ord("a"), half])


def test_a_stop_may_end_with_the_last_of_min_new_tokens():
    assert len(make("c", min_new_tokens=3).push(spell(b"abcd")).token_ids) == 3


def test_eos_has_an_id_and_no_text():
    piece = make(stop_ids=(ord("."),)).finish(spell(b"ab."), stop_token_id=ord("."))
    assert (piece.text, piece.token_ids) == ("ab", spell(b"ab."))


def test_eos_has_text_if_stops_are_included():
    piece = make(stop_ids=(ord("."),), include_stop=True).finish(spell(b"ab."), stop_token_id=ord("."))
    assert piece.text == "ab."


def test_a_possible_stop_token_waits_for_the_next_token():
    output = make(stop_ids=(ord("."),))
    first = output.push(spell(b"ab."))
    assert (first.text, first.token_ids) == ("ab", spell(b"ab"))
    second = output.push(spell(b"c"))
    assert (second.text, second.token_ids) == (".c", spell(b".c"))


def test_a_token_that_may_be_the_stop_token_is_delivered_when_the_output_ends():
    output = make(stop_ids=(ord("."),))
    output.push(spell(b"ab."))
    piece = output.finish([], stop_token_id=ord("."))
    assert (piece.text, piece.token_ids) == ("", spell(b"."))


def test_an_end_by_length_keeps_the_text_of_the_last_token():
    piece = make(stop_ids=(ord("."),)).finish(spell(b"ab."), stop_token_id=None)
    assert piece.text == "ab."


def test_the_last_text_is_searched_for_stop_strings_only_after_min_new_tokens():
    for min_new_tokens, stop_string, text in ((2, "\ufffd", "a"), (3, "", "a\ufffd")):
        piece = make("\ufffd", min_new_tokens=min_new_tokens).finish([ord("a"), 0xC3], stop_token_id=None)
        assert (piece.stop_string, piece.text, len(piece.token_ids)) == (stop_string, text, 2)


def test_a_stop_string_in_the_last_text_removes_the_stop_token():
    output = make("\ufffd", stop_ids=(ord("."),))
    piece = output.finish([ord("a"), 0xC3, ord(".")], stop_token_id=ord("."))
    assert (piece.stop_string, piece.text, piece.token_ids) == ("\ufffd", "a", [ord("a"), 0xC3])


def test_a_stop_token_completes_a_stop_string_only_if_stops_are_included():
    for include_stop, stop_string, text in ((False, "", "ab"), (True, ".", "ab.")):
        output = make(".", stop_ids=(ord("."),), include_stop=include_stop)
        piece = output.finish(spell(b"ab."), stop_token_id=ord("."))
        assert (piece.stop_string, piece.text, piece.token_ids) == (stop_string, text, spell(b"ab."))


def test_the_stop_string_wins_over_an_end_at_a_later_position():
    piece = make("b").finish([*spell(b"abc"), EOS_ID], stop_token_id=EOS_ID)
    assert (piece.text, piece.stop_string, piece.token_ids) == ("a", "b", spell(b"ab"))


def test_without_a_detokenizer_tokens_have_no_text():
    output = SampleOutput(
        detokenizer=None, stop_finder=None, stop_token_ids=frozenset(), min_new_tokens=0, include_stop=False
    )
    assert output.push([1, 2]).token_ids == [1, 2]
    assert output.finish([3], stop_token_id=None).text == ""


ids = st.sampled_from([*b"ab", 0xC3, 0xA9, token("th"), token("the"), token("é"), token("€")])
stop_strings = st.text(alphabet="abthe" + "é€", min_size=1, max_size=3)


@given(
    st.lists(st.lists(ids, max_size=4), max_size=12),
    st.lists(stop_strings, max_size=3),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_output_ends_exactly_at_the_earliest_stop(
    batches: list[list[int]], stops: list[str], min_new_tokens: int, include_stop: bool
):
    output = make(*stops, include_stop=include_stop, min_new_tokens=min_new_tokens)
    text, tokens, stop = "", [], ""
    for batch in batches:
        assert output.num_tokens == len(tokens)
        piece = output.push(batch)
        text, tokens, stop = text + piece.text, tokens + piece.token_ids, piece.stop_string
        if stop:
            break
    else:
        piece = output.finish([], stop_token_id=None)
        text, tokens, stop = text + piece.text, tokens + piece.token_ids, piece.stop_string
    assert (text, tokens, stop) == oracle([t for b in batches for t in b], stops, min_new_tokens, include_stop)


def oracle(tokens: list[int], stops: list[str], min_new_tokens: int, include_stop: bool) -> tuple[str, list[int], str]:
    """Searches the whole text after every token, without the text that a later byte may change."""
    before = ""
    for num_tokens in range(1, len(tokens) + 1):
        text = decode(tokens[:num_tokens])
        text = text if num_tokens == len(tokens) else text.rstrip("\ufffd")
        for end in range(len(before) + 1, len(text) + 1):
            found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default="")
            if found and num_tokens >= min_new_tokens:
                return text[: end if include_stop else end - len(found)], tokens[:num_tokens], found
        before = max(before, text, key=len)
    return decode(tokens), tokens, ""
