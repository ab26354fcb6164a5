"""Stop strings in parsed answers: they are searched in the content, as the caller reads it, and nowhere else."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.chat.answer import ChatOutput
from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.output import OutputPiece, StopFinder
from tests.scheduler_svc.frontend.chat.answers import FAMILIES, hermes, think
from tests.scheduler_svc.frontend.chat.rig import CHATML, spelled
from tests.scheduler_svc.frontend.chat.test_answer import calls_text, cuts, parser, written
from tests.scheduler_svc.frontend.text.test_stop_strings import first_stop


def output(family: str, *stops: str, include_stop: bool = False, min_new_tokens: int = 0) -> ChatOutput:
    return ChatOutput(
        detokenizer=Detokenizer(lambda tokens: CHATML.decode(tokens, skip_special_tokens=False)),
        stop_finder=StopFinder(stops, include_stop=include_stop) if stops else None,
        stop_token_ids=frozenset(),
        min_new_tokens=min_new_tokens,
        include_stop=include_stop,
        parser=parser(family),
    )


def read(out: ChatOutput, batches: list[list[int]]) -> OutputPiece:
    """The whole answer; the last batch is empty."""
    pieces = list[OutputPiece]()
    for batch in batches:
        pieces.append(out.push(batch))
        if pieces[-1].stop_string:
            break
    else:
        pieces.append(out.finish([], stop_token_id=None))
    return joined(pieces)


def joined(pieces: Sequence[OutputPiece]) -> OutputPiece:
    return OutputPiece(
        token_ids=[token for piece in pieces for token in piece.token_ids],
        text="".join(piece.text for piece in pieces),
        stop_string="".join(piece.stop_string for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=[call for piece in pieces for call in piece.calls],
    )


THOUGHT = think("One.\n\nTwo, stop.")
CALL = hermes("f", {"a": "stop\n\n"})


@pytest.mark.parametrize(
    ("text", "stop", "content", "found", "num_calls"),
    [
        (f"{THOUGHT}Hello\n\nworld", "\n\n", "Hello", True, 0),
        (f"{THOUGHT}Hello, stop. No", "stop", "Hello, ", True, 0),
        # At the end of the answer the line breaks stay, so the caller would read them.
        (f"{THOUGHT}Hello\n\n", "\n\n", "Hello", True, 0),
        # Here they belong to the mark.
        (f"{THOUGHT}Hello\n\n{CALL}", "\n\n", "Hello", False, 1),
        (f"{THOUGHT}{CALL}", "stop", "", False, 1),
        (f"Hi {CALL} stop, no", "stop", "Hi\n", True, 1),
        # The marks themselves are not content.
        (f"{THOUGHT}Hello", "</think>", "Hello", False, 0),
        # Anything but a call is content with its marks.
        ("<tool_call>stop</tool_call>", "stop", "<tool_call>", True, 0),
        # The text of two regions is one text.
        (f"a{THOUGHT}b, c", "a\nb", "", True, 0),
        ("a <", "<", "a ", True, 0),
    ],
)
def test_the_content_alone_is_searched(text: str, stop: str, content: str, found: bool, num_calls: int) -> None:
    tokens = spelled(text)
    for batches in ([tokens], [[token] for token in tokens]):
        piece = read(output("hermes", stop), batches)
        assert (piece.text, piece.stop_string) == (content, stop if found else "")
        assert len({call.idx for call in piece.calls}) == num_calls
        assert piece.reasoning == ("One.\n\nTwo, stop." if THOUGHT in text else "")
        assert found or piece.token_ids == tokens


def test_before_min_new_tokens_the_content_goes_on() -> None:
    text = f"{THOUGHT}a.b.c"
    num_tokens = len(spelled(text)) - 2
    assert read(output("hermes", ".", min_new_tokens=num_tokens), [spelled(text)]).text == "a.b"


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(
    data=st.data(),
    stops=st.lists(st.text(st.sampled_from("ab z.\né"), min_size=1, max_size=3), min_size=1, max_size=2),
    include_stop=st.booleans(),
)
def test_the_answer_goes_up_to_the_first_stop_in_its_content(
    name: str, data: Any, stops: list[str], include_stop: bool
) -> None:
    text, *_ = data.draw(written(FAMILIES[name]))
    tokens = spelled(text)
    batches: Any = data.draw(cuts(tokens))  # pyright: ignore[reportArgumentType]
    whole = read(output(name), [tokens])
    end, found = first_stop(whole.text, stops)
    piece = read(output(name, *stops, include_stop=include_stop), batches)
    assert piece.stop_string == found
    assert piece.text == whole.text[: end if include_stop or not found else end - len(found)]
    if not found:
        assert (piece.reasoning, calls_text(piece)) == (whole.reasoning, calls_text(whole))
    assert whole.reasoning.startswith(piece.reasoning)
    # However the tokens arrive, the same ones are kept.
    assert piece == read(output(name, *stops, include_stop=include_stop), [[token] for token in tokens])
