"""Stop strings across token borders, inside tokens and inside characters, compared with the oracle's text."""

import codecs
import itertools
from collections.abc import Iterator

import pytest

from tests.rigs import byte_tokenizer
from tests.system.asks import Ask, answer, send
from tests.system.conftest import Served

LENGTH = 160


def _prompts() -> Iterator[tuple[int, ...]]:
    return ((first, second, ord("a")) for first, second in itertools.product(range(97, 123), range(97, 123)))


def _characters(tokens: list[int]) -> list[tuple[str, int, int]]:
    """(character, index of its first token, index of its last token), whole characters only."""
    found, start = [], 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i, token in enumerate(tokens):
        for byte in byte_tokenizer.token_bytes(token):
            for character in decoder.decode(bytes([byte])):
                found.append((character, start, i))
            if decoder.getstate()[0] == b"":
                start = i + 1
            elif decoder.getstate()[0] == bytes([byte]):
                start = i
    return found


def _find(want_bytes: int) -> tuple[Ask, str, int]:
    """Returns an ask with a character of `want_bytes` bytes over several tokens, the character and its last token."""
    for prompt in _prompts():
        ask = Ask(prompt=prompt, max_new_tokens=LENGTH)
        for character, start, end in _characters(ask.expected().tokens):
            if len(character.encode()) == want_bytes and character != "\ufffd" and start < end and end > 4:
                return ask, character, end
    raise AssertionError(f"no output contains a character of {want_bytes} bytes")


def _check(served: Served, ask: Ask) -> None:
    expected = ask.expected()
    assert expected.reason == "STOP_STRING"
    transcript = served.caller.generate(ask.request()).result()
    ask.check(transcript)
    assert transcript.finished.stop_string in ask.stop_strings


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("num_bytes", [2, 3])
def test_a_stop_string_of_one_character_over_several_tokens_matches(
    served: Served, num_bytes: int, include_stop: bool
) -> None:
    free, character, end = _find(num_bytes)
    ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(character, "nowhere"), include_stop=include_stop)
    # The character may occur earlier inside a piece of the vocabulary; the oracle finds its first end.
    assert len(ask.expected().tokens) <= end + 1
    _check(served, ask)


def _find_text(length: int, *, after: int) -> tuple[Ask, str]:
    """Returns an ask and a piece of its output that begins after `after` characters, is new there, and has no U+FFFD.

    A U+FFFD at the end may become a character with the next token, so the position of a match that ends in one is
    undefined.
    """
    for prompt in _prompts():
        ask = Ask(prompt=prompt, max_new_tokens=LENGTH)
        text = ask.expected().text
        for start in range(after, len(text) - length - 8):
            piece = text[start : start + length]
            if "\ufffd" not in piece and text.find(piece) == start:
                return ask, piece
    raise AssertionError(f"no output contains {length} whole characters")


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 10])
def test_a_stop_string_across_token_borders_matches(served: Served, length: int, include_stop: bool) -> None:
    free, stop = _find_text(length, after=20)
    _check(served, Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(stop,), include_stop=include_stop))


def _ask_with(piece: bytes) -> Ask:
    """Returns an ask with this vocabulary piece in its output, not at the beginning."""
    token = 256 + byte_tokenizer.PIECES.index(piece)
    for prompt in _prompts():
        ask = Ask(prompt=prompt, max_new_tokens=LENGTH)
        if token in ask.expected().tokens[4:]:
            return ask
    raise AssertionError(f"no output contains {piece!r}")


@pytest.mark.parametrize(("piece", "stop"), [(b" the", "th"), (b"STOP", "T"), ("日本".encode(), "日"), (b"\n\n", "\n")])
def test_a_stop_string_inside_a_token_matches(served: Served, piece: bytes, stop: str) -> None:
    free = _ask_with(piece)
    for include_stop in (False, True):
        ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(stop,), include_stop=include_stop)
        _check(served, ask)


def test_the_earliest_of_several_overlapping_stop_strings_wins(served: Served) -> None:
    free, piece = _find_text(6, after=30)
    text = free.expected().text
    at = text.find(piece)
    late = next(text[i : i + 2] for i in range(at + 10, len(text)) if "\ufffd" not in text[i : i + 2])
    # A stop string that begins like the text and then differs holds text back and releases it; the one that matches
    # begins inside the held text.
    false_start = text[at - 3 : at + 4] + "\0never"
    for stops in ((late, false_start, piece), (piece[2:], false_start), (piece, piece[1:4], false_start)):
        _check(served, Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=stops))


def test_text_held_back_for_an_unmatched_stop_string_arrives_at_the_end(served: Served) -> None:
    asks = (Ask(prompt=prompt, max_new_tokens=20) for prompt in _prompts())
    free = next(ask for ask in asks if "\ufffd" not in ask.expected().text[-3:])
    tail = free.expected().text[-3:]
    ask = Ask(prompt=free.prompt, max_new_tokens=20, stop_strings=(tail + "!", tail[1:] + "?"))
    assert ask.expected().reason == "LENGTH"
    answer(served.caller, ask)


def test_a_stop_string_before_min_new_tokens_does_not_match(served: Served) -> None:
    free = Ask(prompt=tuple(b"minimum"), max_new_tokens=LENGTH)
    text = free.expected().text
    once = next(c for i, c in enumerate(text[:20]) if c.isascii() and c.isprintable() and text.find(c, i + 1) > 60)
    ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(once,), min_new_tokens=40)
    assert ask.expected().reason == "STOP_STRING"
    assert len(ask.expected().tokens) > 40
    _check(served, ask)


def test_tokens_after_the_stop_string_are_counted_as_discarded(served: Served) -> None:
    free, stop = _find_text(2, after=40)
    ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(stop,))
    transcript = served.caller.generate(ask.request()).result()
    ask.check(transcript)
    # The core planned further steps while the front end made the text.
    assert transcript.summary.usage.discarded_tokens < LENGTH - len(transcript.tokens)


def test_many_streams_with_stop_strings_equal_the_oracle(served: Served) -> None:
    asks = []
    for prompt in itertools.islice(_prompts(), 24):
        text = Ask(prompt=prompt, max_new_tokens=LENGTH).expected().text
        pairs = (text[i : i + 2] for i in range(50, len(text)))
        stop = next(pair for pair in pairs if "\ufffd" not in pair)
        asks.append(Ask(prompt=prompt, max_new_tokens=LENGTH, stop_strings=(stop, "\0\0\0")))
    streams = send(served.caller, asks)
    streams.check()
