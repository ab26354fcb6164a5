"""Owns the conversion of one sample's tokens to a parsed answer. Knows nothing of gRPC, sockets or other samples.

Tokens are parsed one by one, so the number of tokens of reasoning does not depend on how they arrive.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.frontend.chat.answer import AnswerParser
from scheduler_svc.frontend.text.marked import plain
from scheduler_svc.frontend.text.output import Parsed, SampleOutput


@dataclass(slots=True, kw_only=True)
class ChatOutput(SampleOutput):
    """The output of one sample of a chat."""

    parser: AnswerParser
    # The special tokens that are left out of what the caller sees; None keeps all.
    hidden: re.Pattern[str] | None = None

    def _groups(self, tokens: list[int]) -> Iterable[Sequence[int]]:
        return zip(tokens)

    def _parse(self, text: str, num_tokens: int, *, is_end: bool = False, is_cut: bool = False) -> Parsed:
        was_reasoning = self.parser.is_reasoning
        parsed = self.parser.feed(text)
        if was_reasoning or self.parser.is_reasoning:
            self.reasoning_tokens += num_tokens
        if is_end:
            parsed.add(self.parser.finish(is_cut=is_cut))
        calls = [each._replace(name=plain(each.name), arguments=plain(each.arguments)) for each in parsed.calls]
        return Parsed(self._visible(parsed.content), self._visible(parsed.reasoning), calls)

    def _visible(self, text: str) -> str:
        return plain(self.hidden.sub("", text) if self.hidden is not None and text else text)
