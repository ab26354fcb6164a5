"""Owns the conversion of one sample's tokens to its visible output: offsets, text, and the end at a stop string.

Knows nothing of gRPC, sockets or other streams. The earliest token position wins: a stop string that completes at
position p ends the output after p tokens, even if the core reported an end at a later position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.stop_strings import StopFinder


class CallPiece(NamedTuple):
    """A piece of a call of a tool. `idx` is the call's number in the output; id and name are in the first piece."""

    idx: int
    id: str
    name: str
    arguments: str


class OutputPiece(NamedTuple):
    """The next part of an output. `stop_string` is the string that ended the output, or ""."""

    token_ids: list[int]
    text: str
    stop_string: str
    # Of a parsed answer, whose content is `text`.
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(slots=True, kw_only=True)
class SampleOutput:
    """The output of one sample. Without a detokenizer it has no text; stop strings require one."""

    detokenizer: Detokenizer | None
    stop_finder: StopFinder | None
    stop_token_ids: frozenset[int]
    min_new_tokens: int
    include_stop: bool
    # Output tokens returned so far.
    num_tokens: int = field(default=0, init=False)
    # Of a parsed answer.
    reasoning_tokens: int = field(default=0, init=False)
    # The last token, if it may be the stop token. The next token or the End decides whether its text is visible.
    _withheld: list[int] = field(default_factory=list[int], init=False)

    def push(self, tokens: Sequence[int]) -> OutputPiece:
        """The piece that `tokens` add while the output continues."""
        known = [*self._withheld, *tokens]
        self._withheld = [known.pop()] if known and known[-1] in self.stop_token_ids else []
        num_kept, text, stop_string = self._decode(known)
        return self._piece(known[:num_kept], text, stop_string)

    def finish(self, tokens: Sequence[int], *, stop_token_id: int | None) -> OutputPiece:
        """The piece that the last `tokens` add, with all held text. `stop_token_id` is the token that ended the output.

        The piece contains the stop token's id always and its text only with include_stop.
        """
        known = [*self._withheld, *tokens]
        self._withheld = []
        is_hidden = bool(known) and known[-1] == stop_token_id and not self.include_stop
        visible = known[:-1] if is_hidden else known
        num_kept, text, stop_string = self._decode(visible)
        if not stop_string:
            rest, stop_string = self._release(armed=self.num_tokens + len(visible) >= self.min_new_tokens)
            text += rest
            num_kept = num_kept if stop_string else len(known)
        return self._piece(known[:num_kept], text, stop_string)

    def _piece(self, tokens: list[int], text: str, stop_string: str) -> OutputPiece:
        self.num_tokens += len(tokens)
        return OutputPiece(token_ids=tokens, text=text, stop_string=stop_string)

    def _decode(self, tokens: list[int]) -> tuple[int, str, str]:
        """Returns (number of tokens up to the stop, text, stop string found or "")."""
        if self.detokenizer is None:
            return len(tokens), "", ""
        if self.stop_finder is None:
            return len(tokens), self.detokenizer.push(tokens) if tokens else "", ""
        text = ""
        for num_read, token in enumerate(tokens, start=1):
            armed = self.num_tokens + num_read >= self.min_new_tokens
            visible, found = self.stop_finder.push(self.detokenizer.push((token,)), armed=armed)
            text += visible
            if found:
                return num_read, text, found
        return len(tokens), text, ""

    def _release(self, *, armed: bool) -> tuple[str, str]:
        """Returns (held text, stop string found in it or "")."""
        if self.detokenizer is None:
            return "", ""
        rest = self.detokenizer.finish()
        if self.stop_finder is None:
            return rest, ""
        visible, found = self.stop_finder.push(rest, armed=armed)
        return (visible, found) if found else (visible + self.stop_finder.finish(), "")
