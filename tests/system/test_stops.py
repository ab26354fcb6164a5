"""Stop strings across token borders, inside tokens and inside characters, compared with the oracle's text."""

import codecs
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tests.rigs import byte_tokenizer
from tests.system.asks import Ask, answer, send
from tests.system.conftest import Served

LENGTH = 160
BROKEN = "\ufffd"


@cache
def _texts() -> list[tuple[Ask, list[int], str]]:
    """Asks without stop strings, with their tokens and texts."""
    asks = [
        Ask(prompt=(first, second, ord("a")), max_new_tokens=LENGTH) for first in b"abcd" for second in b"abcdefghij"
    ]
    return [(ask, expected.tokens, expected.text) for ask in asks for expected in [ask.expected()]]


def _stopped(ask: Ask, *stops: str, **more: bool | int) -> Ask:
    stopped = replace(ask, stop_strings=stops, **more)
    assert stopped.expected().reason == "STOP_STRING"
    return stopped


def _check(served: Served, asks: Sequence[Ask]) -> None:
    for ask, transcript in zip(asks, send(served.caller, asks).check(), strict=True):
        assert transcript.finished.stop_string in ask.stop_strings


def _tokens_of_characters(tokens: list[int]) -> list[tuple[int, int]]:
    """The first and the last token of each character of the text."""
    decoder, found, first = codecs.getincrementaldecoder("utf-8")("replace"), list[tuple[int, int]](), 0
    for i, token in enumerate(tokens):
        piece = byte_tokenizer.token_bytes(token)
        for place, byte in enumerate(piece, start=1):
            characters = decoder.decode(bytes([byte]))
            found += [(first, i)] * len(characters)
            if characters:
                # A byte that breaks a character off begins another one.
                first = i
            if not decoder.getstate()[0]:
                first = i + (place == len(piece))
    return found


def test_a_stop_string_matches_wherever_it_lies(served: Served) -> None:
    """Pieces of one to ten characters of each output, kept or not. A match that ends in a half of a character is
    undefined: the next token may complete it."""
    rng, asks, met = random.Random(5), list[Ask](), set[str]()
    for ask, tokens, text in _texts():
        places = _tokens_of_characters(tokens)
        for _ in range(3):
            start, length = rng.randrange(20, len(text) - 20), rng.choice([1, 1, 2, 3, 5, 10])
            stop = text[start : start + length]
            if BROKEN in stop:
                continue
            at = text.find(stop)
            (first, _), (_, last) = places[at], places[at + length - 1]
            met.add("over several tokens" if first < last else "inside one token")
            met.add("ends inside a token" if places[at + length][0] <= last else "ends with a token")
            if length == 1 and first < last:
                met.add("one character of several tokens")
            asks.append(_stopped(ask, stop, "nowhere", include_stop=rng.random() < 0.5))
    print(len(asks), met)
    assert len(met) == 5
    _check(served, asks)


def test_the_earliest_of_several_overlapping_stop_strings_wins(served: Served) -> None:
    ask, text, at = next(
        (ask, text, at)
        for ask, _, text in _texts()
        for at in range(30, len(text) - 30)
        if BROKEN not in text[at - 3 : at + 12] and text.find(text[at : at + 6]) == at
    )
    piece, late = text[at : at + 6], text[at + 10 : at + 12]
    # A stop string that begins like the text and then differs holds text back and releases it; the one that matches
    # begins inside the held text.
    false_start = text[at - 3 : at + 4] + "\0never"
    each = ((late, false_start, piece), (piece[2:], false_start), (piece, piece[1:4], false_start))
    _check(served, [_stopped(ask, *stops) for stops in each])


def test_text_held_back_for_an_unmatched_stop_string_arrives_at_the_end(served: Served) -> None:
    short = (replace(ask, max_new_tokens=20) for ask, _, _ in _texts())
    ask, tail = next((ask, tail) for ask in short if BROKEN not in (tail := ask.expected().text[-3:]))
    held = replace(ask, stop_strings=(tail + "!", tail[1:] + "?"))
    assert held.expected().reason == "LENGTH"
    answer(served.caller, held)


def test_a_stop_string_before_min_new_tokens_does_not_match(served: Served) -> None:
    free = Ask(prompt=tuple(b"minimum"), max_new_tokens=LENGTH)
    text = free.expected().text
    once = next(c for i, c in enumerate(text[:20]) if c.isascii() and c.isprintable() and text.find(c, i + 1) > 60)
    ask = _stopped(free, once, min_new_tokens=40)
    assert len(ask.expected().tokens) > 40
    _check(served, [ask])


def test_tokens_after_the_stop_string_are_counted_as_discarded(served: Served) -> None:
    ask, _, text = _texts()[0]
    transcript = answer(
        served.caller, _stopped(ask, next(two for i in range(40, 90) if BROKEN not in (two := text[i : i + 2])))
    )
    # The core planned further steps while the front end made the text.
    assert transcript.summary.usage.discarded_tokens < LENGTH - len(transcript.tokens)
