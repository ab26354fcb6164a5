"""Owns the incremental decoding of one stream: tokens in, text that will not change any more out.

Knows nothing of stop strings, streams or gRPC; it is handed a decode function. The window is the one of
`tokenizers.decoders.DecodeStream`: decode the tokens of the last complete text together with the new ones, give out
what is longer. DecodeStream itself gives out nothing of a token such as b"end\\xc3" before the character is complete
(a stop string would be found one token late), says nothing of what it holds at the end, holds without bound, and
stays broken once its prefix no longer fits. Two decodes per token cost 0.9 us, DecodeStream 0.5 us, a gRPC message 30.

For byte-level decoders the texts put together equal the decode of all tokens, whatever the bytes. Byte-fallback
decoders take back complete characters when invalid bytes follow; there what was given out stands.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so more held tokens than this are bytes that will never be a character.
MAX_HELD_TOKENS = 16

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece. `context` is the prompt's last few tokens.

    A prompt that ends inside a character gives no context: the character's other half comes out as U+FFFD.
    """

    __slots__ = ("_context", "_decode", "_held", "_num_context_chars", "_shown")

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._held: list[int] = []
        self._restart(list(context))

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; characters begun and not ended are held back."""
        self._held.extend(tokens)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT):
            return self._push_incomplete(text)
        new = self._beyond_shown(text)
        if new or self._num_context_chars < len(self._shown):
            self._restart(self._held)
        # Tokens without text (skipped specials) are forgotten; the context stays.
        self._held = []
        return new

    def finish(self) -> str:
        """All that is held, as the decoder shows it at the end of the output: half characters are U+FFFD."""
        if not self._held:
            return ""
        new = self._beyond_shown(self._decode(self._context + self._held))
        self._held = []
        self._restart([])
        return new

    def _restart(self, context: list[int]) -> None:
        shown = self._decode(context) if context else ""
        if shown.endswith(REPLACEMENT):
            context, shown = [], ""
        self._context, self._shown, self._num_context_chars = context, shown, len(shown)

    def _push_incomplete(self, text: str) -> str:
        complete = text.rstrip(REPLACEMENT)
        new = complete[len(self._shown) :] if complete.startswith(self._shown) else ""
        self._shown += new
        if len(self._held) > MAX_HELD_TOKENS:
            new += self._release_head(text)
        return new

    def _release_head(self, text: str) -> str:
        """Gives out the held tokens but for the last, at a place where the text falls apart in the same two pieces."""
        # The character begun at the end has at most 3 bytes; tokens without text may stand between them.
        num_tail = next((n for n in range(3, len(self._held)) if "".join(self._split(n)) == text), 1)
        head_text, tail = self._split(num_tail)[0], self._held[-num_tail:]
        new, shown_of_tail = head_text[len(self._shown) :], self._shown[len(head_text) :]
        self._restart([])
        self._held, self._shown = tail, shown_of_tail
        return new

    def _split(self, num_tail: int) -> tuple[str, str]:
        head, tail = self._held[:-num_tail], self._held[-num_tail:]
        return self._decode(self._context + head), self._decode(tail)

    def _beyond_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # The decoder took back what was shown: go on with what the held tokens say by themselves.
        num_shown_of_held = len(self._shown) - self._num_context_chars
        return self._decode(self._held)[num_shown_of_held:]
