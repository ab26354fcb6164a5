"""Stop strings across token borders, inside tokens and inside characters, held against the oracle's text."""

import codecs
import itertools
from collections.abc import Iterator

import pytest

from tests.rigs import byte_tokenizer
from tests.system.asks import Ask
from tests.system.conftest import Served

LENGTH = 160


def _prompts() -> Iterator[tuple[int, ...]]:
    return ((first, second, ord("a")) for first, second in itertools.product(range(97, 123), range(97, 123)))


def _characters(tokens: list[int]) -> list[tuple[str, int, int]]:
    """(character, index of the token it starts in, of the token it ends in), whole characters only."""
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
    """An ask whose output holds a character of so many bytes over several tokens; it, and the token it ends in."""
    for prompt in _prompts():
        ask = Ask(prompt=prompt, max_new_tokens=LENGTH)
        for character, start, end in _characters(ask.expected().tokens):
            if len(character.encode()) == want_bytes and character != "\ufffd" and start < end and end > 4:
                return ask, character, end
    raise AssertionError(f"no output holds a character of {want_bytes} bytes")


def _check(served: Served, ask: Ask) -> None:
    expected = ask.expected()
    assert expected.reason == "STOP_STRING"
    transcript = served.caller.generate(ask.request()).result()
    ask.check(transcript)
    assert transcript.finished.stop_string in ask.stop_strings


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("num_bytes", [2, 3])
def test_a_character_whose_bytes_are_several_tokens(served: Served, num_bytes: int, include_stop: bool) -> None:
    free, character, end = _find(num_bytes)
    ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(character, "nowhere"), include_stop=include_stop)
    # It may occur earlier as a piece of the vocabulary; the oracle says where it ends first.
    assert len(ask.expected().tokens) <= end + 1
    _check(served, ask)


def _find_text(length: int, *, after: int) -> tuple[Ask, str]:
    """An ask, and a piece of its output's text that begins after so many characters, is new there, and has no U+FFFD.

    Whether a U+FFFD at the end stands or will become a character is known only a token later, so where a stop string
    that ends in one is found is left open.
    """
    for prompt in _prompts():
        ask = Ask(prompt=prompt, max_new_tokens=LENGTH)
        text = ask.expected().text
        for start in range(after, len(text) - length - 8):
            piece = text[start : start + length]
            if "\ufffd" not in piece and text.find(piece) == start:
                return ask, piece
    raise AssertionError(f"no output has {length} characters without a broken one")


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 10])
def test_text_across_token_borders(served: Served, length: int, include_stop: bool) -> None:
    free, stop = _find_text(length, after=20)
    _check(served, Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(stop,), include_stop=include_stop))


def _ask_with(piece: bytes) -> Ask:
    """An ask whose output holds this vocabulary piece, not at its beginning."""
    token = 256 + byte_tokenizer.PIECES.index(piece)
    for prompt in _prompts():
        ask = Ask(prompt=prompt, max_new_tokens=LENGTH)
        if token in ask.expected().tokens[4:]:
            return ask
    raise AssertionError(f"no output holds {piece!r}")


@pytest.mark.parametrize(("piece", "stop"), [(b" the", "th"), (b"STOP", "T"), ("日本".encode(), "日"), (b"\n\n", "\n")])
def test_a_string_that_ends_inside_a_token(served: Served, piece: bytes, stop: str) -> None:
    free = _ask_with(piece)
    for include_stop in (False, True):
        ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(stop,), include_stop=include_stop)
        _check(served, ask)


def test_the_earliest_of_several_wins_and_overlaps_do_not_hide_it(served: Served) -> None:
    free, piece = _find_text(6, after=30)
    text = free.expected().text
    at = text.find(piece)
    late = next(text[i : i + 2] for i in range(at + 10, len(text)) if "\ufffd" not in text[i : i + 2])
    # A string that begins as the text does and then differs keeps text back and lets it go again, and inside it another
    # begins that is there.
    false_start = text[at - 3 : at + 4] + "\0never"
    for stops in ((late, false_start, piece), (piece[2:], false_start), (piece, piece[1:4], false_start)):
        _check(served, Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=stops))


def test_what_is_held_back_for_a_string_that_never_comes_arrives_at_the_end(served: Served) -> None:
    asks = (Ask(prompt=prompt, max_new_tokens=20) for prompt in _prompts())
    free = next(ask for ask in asks if "\ufffd" not in ask.expected().text[-3:])
    tail = free.expected().text[-3:]
    ask = Ask(prompt=free.prompt, max_new_tokens=20, stop_strings=(tail + "!", tail[1:] + "?"))
    assert ask.expected().reason == "LENGTH"
    ask.check(served.caller.generate(ask.request()).result())


def test_a_stop_string_before_min_new_tokens_does_not_match(served: Served) -> None:
    free = Ask(prompt=tuple(b"minimum"), max_new_tokens=LENGTH)
    text = free.expected().text
    once = next(c for i, c in enumerate(text[:20]) if c.isascii() and c.isprintable() and text.find(c, i + 1) > 60)
    ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(once,), min_new_tokens=40)
    assert ask.expected().reason == "STOP_STRING"
    assert len(ask.expected().tokens) > 40
    _check(served, ask)


def test_tokens_beyond_the_stop_are_counted_as_discarded(served: Served) -> None:
    free, stop = _find_text(2, after=40)
    ask = Ask(prompt=free.prompt, max_new_tokens=LENGTH, stop_strings=(stop,))
    transcript = served.caller.generate(ask.request()).result()
    ask.check(transcript)
    # The core had planned on while the text was made.
    assert transcript.summary.usage.discarded_tokens < LENGTH - len(transcript.tokens)


def test_many_streams_with_stop_strings_at_once(served: Served) -> None:
    asks = []
    for prompt in itertools.islice(_prompts(), 24):
        text = Ask(prompt=prompt, max_new_tokens=LENGTH).expected().text
        pairs = (text[i : i + 2] for i in range(50, len(text)))
        stop = next(pair for pair in pairs if "\ufffd" not in pair)
        asks.append(Ask(prompt=prompt, max_new_tokens=LENGTH, stop_strings=(stop, "\0\0\0")))
    streams = [served.caller.generate(ask.request()) for ask in asks]
    for ask, stream in zip(asks, streams, strict=True):
        ask.check(stream.result())
