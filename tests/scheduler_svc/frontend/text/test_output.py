"""The tokens, text and end of one output. The earliest token position wins."""

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.output import SampleOutput, StopFinder
from tests.scheduler_svc.frontend.text.test_stop_strings import first_stop
from tests.scheduler_svc.frontend.tokenizers_for_tests import byte_level, spell, token

TOKENIZER = byte_level()


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_without_a_detokenizer_tokens_have_no_text():
    output = SampleOutput(
        detokenizer=None, stop_finder=None, stop_token_ids=frozenset(), min_new_tokens=0, include_stop=False
    )
    assert output.push([1, 2]).token_ids == [1, 2]
    assert output.finish([3], stop_token_id=None).text == ""


STOP = ord(".")
# A space and three of the four bytes of a character.
HALF = token(" 😀") - 1
ids = st.sampled_from([*b"ab.", 0x80, 0xC3, 0xA9, HALF, token("th"), token("the"), token("é"), token("€")])
stop_strings = st.text(alphabet="abthe. é€\ufffd", min_size=1, max_size=3)


@given(
    batches=st.lists(st.lists(ids, max_size=4), min_size=1, max_size=12),
    ends=st.sampled_from(["", "stop token"]),
    comes_with_end=st.booleans(),
    stops=st.lists(stop_strings, max_size=3),
    min_new_tokens=st.integers(0, 5),
    include_stop=st.booleans(),
)
# A stop string in a token that also begins a character; at the last of `min_new_tokens`; before a later stop token.
@example([[ord("a"), HALF, 0x80]], "", False, ["a "], 0, False)
@example([spell(b"abcd")], "", False, ["c"], 3, False)
@example([spell(b"abc")], "stop token", True, ["b"], 0, False)
# The stop token has an id, and text if stops are included. It may come before the end or with it.
@example([spell(b"ab")], "stop token", True, [], 0, False)
@example([spell(b"ab")], "stop token", True, [], 0, True)
@example([spell(b"ab")], "stop token", False, [], 0, False)
# The same token may be none.
@example([spell(b"ab."), spell(b"c")], "", False, [], 0, False)
@example([spell(b"ab.")], "", True, [], 0, False)
# The last text is searched, after `min_new_tokens` and with the stop token if it is included.
@example([[ord("a"), 0xC3]], "", True, ["\ufffd"], 2, False)
@example([[ord("a"), 0xC3]], "", True, ["\ufffd"], 3, False)
@example([[ord("a"), 0xC3]], "stop token", True, ["\ufffd"], 0, False)
@example([spell(b"ab")], "stop token", True, ["."], 0, False)
@example([spell(b"ab")], "stop token", True, ["."], 0, True)
def test_the_output_ends_exactly_at_the_earliest_stop(
    batches: list[list[int]], ends: str, comes_with_end: bool, stops: list[str], min_new_tokens: int, include_stop: bool
):
    batches = [*batches[:-1], batches[-1] + [STOP] * bool(ends)]
    output = SampleOutput(
        detokenizer=Detokenizer(decode),
        stop_finder=StopFinder(stops, include_stop=include_stop) if stops else None,
        stop_token_ids=frozenset([STOP]),
        min_new_tokens=min_new_tokens,
        include_stop=include_stop,
    )
    text, tokens, stop, pushed = "", list[int](), "", list[int]()
    for batch in batches[: -1 if comes_with_end else None]:
        assert output.num_tokens == len(tokens)
        piece = output.push(batch)
        text, tokens, stop, pushed = text + piece.text, tokens + piece.token_ids, piece.stop_string, pushed + batch
        if stop:
            break
        # Whether a token is the stop token is known with the next one.
        assert tokens == (pushed[:-1] if pushed[-1:] == [STOP] else pushed)
    else:
        piece = output.finish(batches[-1] if comes_with_end else [], stop_token_id=STOP if ends else None)
        text, tokens, stop = text + piece.text, tokens + piece.token_ids, piece.stop_string
    every = [t for b in batches for t in b]
    num_shown = len(every) - (bool(ends) and not include_stop)
    assert (text, tokens, stop) == oracle(every, num_shown, stops, min_new_tokens, include_stop)


def oracle(
    tokens: list[int], num_shown: int, stops: list[str], min_new_tokens: int, include_stop: bool
) -> tuple[str, list[int], str]:
    """Searches the whole text after every token, without the text that a later byte may change."""
    before = ""
    for num_tokens in range(1, num_shown + 1):
        text = decode(tokens[:num_tokens])
        text = text if num_tokens == num_shown else text.rstrip("\ufffd")
        end, found = first_stop(text, stops, len(before))
        if found and num_tokens >= min_new_tokens:
            return text[: end if include_stop else end - len(found)], tokens[:num_tokens], found
        before = max(before, text, key=len)
    return decode(tokens[:num_shown]), tokens, ""
