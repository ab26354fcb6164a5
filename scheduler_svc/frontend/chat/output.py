"""Owns the conversion of one sample's tokens to a parsed answer. Knows nothing of gRPC, sockets or other samples.

Stop strings are searched in the whole text, before it is parsed. Tokens are parsed one by one, so the number of tokens
of reasoning does not depend on how they arrive.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.frontend.chat.answer import AnswerParser, Parsed
from scheduler_svc.frontend.text.marked import plain
from scheduler_svc.frontend.text.output import OutputPiece, SampleOutput


@dataclass(slots=True, kw_only=True)
class ChatOutput(SampleOutput):
    """The output of one sample of a chat."""

    parser: AnswerParser
    # The special tokens that are left out of what the caller sees; None keeps all.
    hidden: re.Pattern[str] | None = None

    def push(self, tokens: Sequence[int]) -> OutputPiece:
        """The piece that `tokens` add while the output continues."""
        return self._join(SampleOutput.push(self, (token,)) for token in tokens)

    def finish(self, tokens: Sequence[int], *, stop_token_id: int | None) -> OutputPiece:
        """The piece that the last `tokens` add, with all held text."""
        before = self.push(tokens[:-1])
        if before.stop_string:
            return before
        last = self._join([SampleOutput.finish(self, tokens[-1:], stop_token_id=stop_token_id)], is_end=True)
        return _added(before, last)

    def _join(self, pieces: Iterable[OutputPiece], *, is_end: bool = False) -> OutputPiece:
        token_ids, parsed, stop_string = list[int](), Parsed(), ""
        for piece in pieces:
            was_reasoning = self.parser.is_reasoning
            parsed.add(self.parser.feed(piece.text))
            if was_reasoning or self.parser.is_reasoning:
                self.reasoning_tokens += len(piece.token_ids)
            token_ids += piece.token_ids
            if stop_string := piece.stop_string:
                break
        if stop_string or is_end:
            parsed.add(self.parser.finish())
        return OutputPiece(
            token_ids=token_ids,
            text=self._visible(parsed.content),
            stop_string=stop_string,
            reasoning=self._visible(parsed.reasoning),
            calls=[each._replace(name=plain(each.name), arguments=plain(each.arguments)) for each in parsed.calls],
        )

    def _visible(self, text: str) -> str:
        return plain(self.hidden.sub("", text) if self.hidden is not None and text else text)


def _added(first: OutputPiece, last: OutputPiece) -> OutputPiece:
    return OutputPiece(
        token_ids=first.token_ids + last.token_ids,
        text=first.text + last.text,
        stop_string=last.stop_string,
        reasoning=first.reasoning + last.reasoning,
        calls=[*first.calls, *last.calls],
    )
