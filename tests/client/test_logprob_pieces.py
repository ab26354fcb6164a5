"""Pieces of text that come with logprobs, and what a message without its parts ends with."""

import pytest
from tandem.v1 import inference_pb2 as pb

from tandem_client.errors import ProtocolError
from tandem_client.types import TokenPiece
from tandem_client.wire import messages

PIECES = [pb.TokenPiece(text="", data=b"\xf0\x9f"), pb.TokenPiece(text="😀", data=b"\x98\x80")]
TOP = [pb.TokenPiece(text=text, data=text.encode()) for text in ("a", " b", "<s>", "c")]


def logprobs(**changes: object) -> pb.Logprobs:
    whole = {"logprobs": [-1.0, -2.0], "top_k": 2, "top_token_ids": [1, 2, 3, 4], "top_logprobs": [-1.0, -2.0] * 2}
    return pb.Logprobs(**{**whole, "pieces": PIECES, "top_pieces": TOP, **changes})


def test_each_token_and_each_alternative_has_its_piece() -> None:
    first, second = messages.delta(pb.Delta(token_ids=[7, 8], logprobs=logprobs())).logprobs
    assert (first.piece, second.piece) == (
        TokenPiece(text="", data=b"\xf0\x9f"),
        TokenPiece(text="😀", data=b"\x98\x80"),
    )
    assert [piece.text for piece in (*first.top_pieces, *second.top_pieces)] == ["a", " b", "<s>", "c"]
    assert b"".join(each.piece.data for each in (first, second) if each.piece) == "😀".encode()
    info = messages.prompt_info(pb.PromptInfo(start=1, logprobs=logprobs(), first=TOP[0]))
    assert info.first == TokenPiece(text="a", data=b"a") and info.logprobs[1] == second


@pytest.mark.parametrize("changes", [{"pieces": PIECES[:1]}, {"top_pieces": []}, {"top_pieces": [*TOP, TOP[0]]}])
def test_missing_pieces_end_the_stream(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=r"pieces? of text"):
        messages.delta(pb.Delta(token_ids=[7, 8], logprobs=logprobs(**changes)))
