"""Owns the incremental decoding of one output: from tokens to the text that later tokens cannot change, and what each
token adds to it: its piece of the text, and its own bytes.

Knows nothing of stop strings, streams or gRPC; the caller passes a decode function. The method is that of
`tokenizers.decoders.DecodeStream`: decode the tokens of the last complete text together with the new tokens, and return
what the new text adds. DecodeStream itself has four faults: it returns nothing of a token such as b"end\\xc3" until the
character is complete (a stop string would be found one token late), it does not return the held text at the end of the
output, it holds tokens without bound, and it fails for good if its prefix no longer matches. Two decodes per token cost
0.9 us, DecodeStream 0.5 us, a gRPC message 30 us.

With byte-level decoders the concatenated texts equal the decode of all tokens, for any bytes. Byte-fallback decoders
may replace complete characters if invalid bytes follow; text that was already returned then stays.

Some decoders replace in the whole text of all tokens, as Transformers' clean-up does: " ." becomes ".". The text that
one replacement returns is what the next one reads, and each holds back the end of its text while that may begin its
pattern. Pieces come from the same `Detokenizer` as the text, so joined they are the text.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers

# A pattern and what takes its place.
Pair = tuple[str, str]
REPLACEMENT = "\ufffd"
# Tokens of the returned text that give the next ones their context. More are decoded again for nothing.
MAX_CONTEXT_TOKENS = 8
# A UTF-8 character has at most 4 bytes, so more held tokens than this are bytes that will never be a character.
MAX_HELD_TOKENS = 16

Decode = Callable[[list[int]], str]
# How SentencePiece's vocabularies write a byte without a token.
_BYTE = re.compile("<0x([0-9A-F]{2})>")
# Any token that is a letter or a digit is an anchor, and it is among the first.
_MAX_ANCHOR_ID = 4096


class Replacer:
    __slots__ = ("_held", "_pairs")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        # By replacement: the end of its text.
        self._held = [""] * len(pairs)

    @property
    def is_empty(self) -> bool:
        return not any(self._held)

    def fork(self) -> "Replacer":
        """Another one, which goes on from here alone."""
        if not self._pairs:
            return self
        other = copy.copy(self)
        other._held = list(self._held)
        return other

    def push(self, text: str) -> str:
        """The text that later text cannot change."""
        for idx, (old, new) in enumerate(self._pairs):
            *before, rest = (self._held[idx] + text).split(old)
            kept = next(size for size in range(len(old) - 1, -1, -1) if rest.endswith(old[:size]))
            self._held[idx] = rest[len(rest) - kept :]
            text = new.join([*before, rest[: len(rest) - kept]])
        return text

    def finish(self) -> str:
        """The held text, at the end."""
        text = ""
        for idx, (old, new) in enumerate(self._pairs):
            text = (self._held[idx] + text).replace(old, new)
            self._held[idx] = ""
        return text


def take_replacements(tokenizer: "tokenizers.Tokenizer") -> tuple[Pair, ...]:
    """Takes the last replacements away from a tokenizer's decoder, if they see the whole text, and returns them."""
    from tokenizers import decoders

    if tokenizer.decoder is None:
        return ()
    spec = json.loads(tokenizer.decoder.__getstate__())
    steps = spec.get("decoders", [])
    num_left = len(steps)
    while num_left and steps[num_left - 1]["type"] == "Replace" and steps[num_left - 1]["pattern"].get("String"):
        num_left -= 1
    # Before a Fuse, a decoder replaces in each token by itself.
    if not num_left or steps[num_left - 1]["type"] != "Fuse":
        return ()
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({**spec, "decoders": steps[:num_left]}).encode())
    tokenizer.decoder = decoder
    return tuple((step["pattern"]["String"], step["content"]) for step in steps[num_left:])


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece. `context` is the prompt's last few tokens.

    `anchor` is a token with ordinary text, or nothing. It stands before tokens where the text goes on after tokens that
    give no context, because decoders strip the white space at the start of a text. If the prompt ends inside a
    character, that character's other half becomes U+FFFD. `replacements` are made in the text of all tokens.
    """

    __slots__ = ("_anchor", "_context", "_decode", "_held", "_num_context_chars", "_replacer", "_shown")

    def __init__(
        self,
        decode: Decode,
        context: Sequence[int] = (),
        anchor: Sequence[int] = (),
        replacements: Sequence[Pair] = (),
    ) -> None:
        self._decode = decode
        self._replacer = Replacer(replacements)
        self._anchor = list(anchor)
        self._held: list[int] = []
        self._restart(list(context))

    @property
    def is_whole(self) -> bool:
        """Whether no token begins a character that is incomplete."""
        return not self._held

    def fork(self) -> "Detokenizer":
        """Another one, which goes on from here alone."""
        other = copy.copy(self)
        other._held, other._replacer = list(self._held), self._replacer.fork()
        return other

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete. The beginning of an incomplete character is held back."""
        return self._replacer.push(self._complete(tokens))

    def finish(self) -> str:
        """The text of all held tokens, as the decoder shows it at the end: incomplete characters are U+FFFD."""
        return self._replacer.push(self._incomplete()) + self._replacer.finish()

    def _complete(self, tokens: Sequence[int]) -> str:
        self._held.extend(tokens)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT):
            return self._push_incomplete(text)
        new = self._beyond_shown(text)
        if new or not self._context or self._num_context_chars < len(self._shown):
            self._restart(self._held)
        # Tokens without text (skipped special tokens) are dropped; the context stays.
        self._held = []
        return new

    def _incomplete(self) -> str:
        if not self._held:
            return ""
        new = self._beyond_shown(self._decode(self._context + self._held))
        self._held = []
        self._restart([])
        return new

    def _restart(self, before: list[int]) -> None:
        context = before[-MAX_CONTEXT_TOKENS:]
        shown = self._decode(context) if context else ""
        if not shown or shown.endswith(REPLACEMENT):
            # Either the text has not begun, or it has and its last tokens give no context.
            context = self._anchor if before and self._inside(before) else []
            shown = self._decode(context) if context else ""
        self._context, self._shown, self._num_context_chars = context, shown, len(shown)

    def _inside(self, tokens: list[int]) -> str:
        """The text of `tokens` inside a text."""
        return self._decode(self._anchor + tokens)[len(self._decode(self._anchor)) :]

    def _push_incomplete(self, text: str) -> str:
        complete = text.rstrip(REPLACEMENT)
        new = complete[len(self._shown) :] if complete.startswith(self._shown) else ""
        self._shown += new
        if len(self._held) > MAX_HELD_TOKENS:
            new += self._release_head(text)
        return new

    def _release_head(self, text: str) -> str:
        """Returns the text of the oldest held tokens and keeps the last few.

        The split is where head and tail, decoded separately, give the same text as together.
        """
        # The incomplete character at the end has at most 3 bytes, and tokens without text may lie between them.
        num_tail = next((n for n in range(3, len(self._held)) if "".join(self._split(n)) == text), 1)
        head_text, head, tail = self._split(num_tail)[0], self._held[:-num_tail], self._held[-num_tail:]
        new, shown_of_tail = head_text[len(self._shown) :], self._shown[len(head_text) :]
        self._restart(head)
        self._held, self._shown = tail, self._shown + shown_of_tail
        return new

    def _split(self, num_tail: int) -> tuple[str, str]:
        head, tail = self._held[:-num_tail], self._held[-num_tail:]
        return self._decode(self._context + head), self._inside(tail)

    def _beyond_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # The decoder replaced text that was already returned: continue with the text of the held tokens alone.
        text = self._inside(self._held) if self._context else self._decode(self._held)
        return text[len(self._shown) - self._num_context_chars :]


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


# A character for each byte.
_CHARS = "latin-1"


class Pieces:
    """Reads the tokens of one text in order. `left_out`: the names of the tokens that `decode` leaves out.

    `replacements` are made in the text and in its bytes; what they hold back is a part of a later piece.
    """

    def __init__(
        self,
        decode: Decode,
        token_bytes: TokenBytes,
        left_out: Mapping[int, str],
        context: Sequence[int],
        replacements: Sequence[Pair],
    ) -> None:
        self._bytes, self._left_out = token_bytes, left_out
        self._detokenizer = Detokenizer(decode, context, token_bytes.anchor)
        self._texts = Replacer(replacements)
        self._datas = Replacer(
            [(old.encode().decode(_CHARS), new.encode().decode(_CHARS)) for old, new in replacements]
        )

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
        return Piece(text, self._datas.finish().encode(_CHARS))

    def _read(self, token_id: int, detokenizer: Detokenizer, texts: Replacer, datas: Replacer) -> Piece:
        if (name := self._left_out.get(token_id)) is not None:
            return Piece(name, b"")
        was_whole, text = detokenizer.is_whole, detokenizer.push((token_id,))
        data = text.encode() if was_whole and detokenizer.is_whole else self._bytes.of(token_id)
        return Piece(texts.push(text), datas.push(data.decode(_CHARS)).encode(_CHARS))
