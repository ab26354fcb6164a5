"""Owns one stream's way from tokens to what the caller gets: offsets, text, and where a stop string ends it.

Knows nothing of gRPC, sockets or other streams. The earliest token position wins: a stop string that completes at
position p ends the output after p tokens, whatever the core said of later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.stop_strings import StopFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPiece:
    """What is new. `token_offset` counts the output tokens before it; `stop_string` is what ended the output, or ""."""

    token_offset: int
    token_ids: list[int]
    text: str
    stop_string: str


class SampleOutput:
    """The output of one request. Without a detokenizer there is no text; stop strings need one."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_min_new_tokens",
        "_stop_finder",
        "_stop_token_ids",
        "_withheld",
        "num_tokens",
    )

    def __init__(
        self,
        *,
        detokenizer: Detokenizer | None,
        stop_finder: StopFinder | None,
        stop_token_ids: frozenset[int],
        min_new_tokens: int,
        include_stop: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_finder = stop_finder
        self._stop_token_ids = stop_token_ids
        self._min_new_tokens = min_new_tokens
        self._include_stop = include_stop
        # A token that may be the stop token, until an End or another token tells: its text is shown only then.
        self._withheld: list[int] = []
        # Output tokens given out.
        self.num_tokens = 0

    def push(self, tokens: Sequence[int]) -> OutputPiece:
        """What `tokens` add while the output goes on."""
        known = [*self._withheld, *tokens]
        self._withheld = [known.pop()] if known and known[-1] in self._stop_token_ids else []
        num_kept, text, stop_string = self._speak(known)
        return self._piece(known[:num_kept], text, stop_string)

    def finish(self, tokens: Sequence[int], *, stop_token_id: int | None) -> OutputPiece:
        """What the last `tokens` add, and all text held back. `stop_token_id` is what ended the output, if that did.

        The stop token's own text is shown only with include_stop; its id always.
        """
        known = [*self._withheld, *tokens]
        self._withheld = []
        is_silent = bool(known) and known[-1] == stop_token_id and not self._include_stop
        speaking = known[:-1] if is_silent else known
        num_kept, text, stop_string = self._speak(speaking)
        if not stop_string:
            rest, stop_string = self._release(armed=self.num_tokens + len(speaking) >= self._min_new_tokens)
            text += rest
            num_kept = num_kept if stop_string else len(known)
        return self._piece(known[:num_kept], text, stop_string)

    def _piece(self, tokens: list[int], text: str, stop_string: str) -> OutputPiece:
        piece = OutputPiece(token_offset=self.num_tokens, token_ids=tokens, text=text, stop_string=stop_string)
        self.num_tokens += len(tokens)
        return piece

    def _speak(self, tokens: list[int]) -> tuple[int, str, str]:
        """Returns (tokens up to the stop, text, stop string found or "")."""
        if self._detokenizer is None:
            return len(tokens), "", ""
        if self._stop_finder is None:
            return len(tokens), self._detokenizer.push(tokens) if tokens else "", ""
        text = ""
        for num_read, token in enumerate(tokens, start=1):
            armed = self.num_tokens + num_read >= self._min_new_tokens
            shown, found = self._stop_finder.push(self._detokenizer.push((token,)), armed=armed)
            text += shown
            if found:
                return num_read, text, found
        return len(tokens), text, ""

    def _release(self, *, armed: bool) -> tuple[str, str]:
        if self._detokenizer is None:
            return "", ""
        rest = self._detokenizer.finish()
        if self._stop_finder is None:
            return rest, ""
        shown, found = self._stop_finder.push(rest, armed=armed)
        return (shown, found) if found else (shown + self._stop_finder.finish(), "")
