"""Owns what each token adds to a text: its piece of the text, and its own bytes.

The pieces of a text's tokens come from the same `Detokenizer` as the text, so joined they are the text. Knows nothing
of requests or streams.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from scheduler_svc.frontend.text.detokenize import MAX_CONTEXT_TOKENS, REPLACEMENT, Decode, Detokenizer, Pair, Replacer

if TYPE_CHECKING:
    import tokenizers

# How SentencePiece's vocabularies write a byte without a token.
_BYTE = re.compile("<0x([0-9A-F]{2})>")
# Any token whose text is a letter or a digit is an anchor, and it is among the first.
_MAX_ANCHOR_ID = 4096


def _alphabet() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


_ALPHABET = _alphabet()


class Piece(NamedTuple):
    """`text` and `data` as tandem.v1.TokenPiece has them."""

    text: str
    data: bytes


class TokenBytes:
    """The bytes of single tokens inside a text."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    @cached_property
    def anchor(self) -> list[int]:
        """A token with ordinary text, for `Detokenizer`; empty if the vocabulary has none."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), _MAX_ANCHOR_ID)):
            text = self._decode([token_id])
            if text.isascii() and text.isalnum() and not _BYTE.fullmatch(self._string(token_id)):
                return [token_id]
        return []

    def of(self, token_id: int) -> bytes:
        """The token's own bytes."""
        if (data := self._known.get(token_id)) is None:
            data = self._known[token_id] = self._read(token_id)
        return data

    def _read(self, token_id: int) -> bytes:
        text, string = self._decode([*self.anchor, token_id])[len(self._decode(self.anchor)) :], self._string(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        if byte := _BYTE.fullmatch(string):
            return bytes.fromhex(byte[1])
        return bytes(map(_ALPHABET.__getitem__, string)) if _ALPHABET.keys() >= set(string) else text.encode()

    def _string(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _as_chars(data: bytes) -> str:
    """A character for each byte."""
    return data.decode("latin-1")


def _as_bytes(chars: str) -> bytes:
    return chars.encode("latin-1")


class Pieces:
    """Reads the tokens of one text in order. `left_out`: the names of the tokens that `decode` leaves out.

    `replacements` are made in the text and in its bytes; what they hold back is a part of a later piece.
    """

    def __init__(
        self,
        decode: Decode,
        token_bytes: TokenBytes,
        left_out: Mapping[int, str],
        context: Sequence[int] = (),
        replacements: Sequence[Pair] = (),
    ) -> None:
        self._bytes, self._left_out = token_bytes, left_out
        self._detokenizer = Detokenizer(decode, context, token_bytes.anchor)
        self._texts = Replacer(replacements)
        self._datas = Replacer([(_as_chars(old.encode()), _as_chars(new.encode())) for old, new in replacements])

    def push(self, token_id: int) -> Piece:
        """What the next token adds."""
        return self._read(token_id, self._detokenizer, self._texts, self._datas)

    def peek(self, token_id: int) -> Piece:
        """What this token would add, if it came next."""
        return self._read(token_id, self._detokenizer.fork(), self._texts.fork(), self._datas.fork())

    def may_grow(self, token_ids: Sequence[int]) -> bool:
        """Whether the piece of the last of these tokens, if they came next, would grow at the end of the text."""
        detokenizer, texts, datas = self._detokenizer.fork(), self._texts.fork(), self._datas.fork()
        for token_id in token_ids:
            self._read(token_id, detokenizer, texts, datas)
        return bool(token_ids) and not (detokenizer.is_whole and texts.is_empty)

    def rest(self) -> Piece:
        """At the end of the text: what the last token adds besides, because no later one changes it."""
        text = self._texts.push(self._detokenizer.finish()) + self._texts.finish()
        return Piece(text, _as_bytes(self._datas.finish()))

    def _read(self, token_id: int, detokenizer: Detokenizer, texts: Replacer, datas: Replacer) -> Piece:
        if (name := self._left_out.get(token_id)) is not None:
            return Piece(name, b"")
        was_whole, text = detokenizer.is_whole, detokenizer.push((token_id,))
        data = text.encode() if was_whole and detokenizer.is_whole else self._bytes.of(token_id)
        return Piece(texts.push(text), _as_bytes(datas.push(_as_chars(data))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesOfRequest:
    """Reads the prompt and the outputs of one request."""

    decode: Decode
    token_bytes: TokenBytes
    left_out: Mapping[int, str] = field(repr=False)
    prompt: Sequence[int] = field(repr=False)
    replacements: Sequence[Pair] = ()

    def at(self, position: int) -> Pieces:
        """Reads what follows this number of the prompt's tokens."""
        context = list(self.prompt[max(0, position - MAX_CONTEXT_TOKENS) : position])
        return Pieces(self.decode, self.token_bytes, self.left_out, context, self.replacements)
