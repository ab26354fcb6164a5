"""What all answers of one HTTP request have in common: id, model, time, and what was asked for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_client.gateway.answers.prompt import ShownPrompt
from tandem_client.gateway.answers.usage import Tally
from tandem_client.gateway.openai.wanted import Wanted

_COMPLETION_ID, _CHAT_ID = "cmpl-", "chatcmpl-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """`prompts`: one for each call, in order."""

    wanted: Wanted
    request_id: str
    model: str
    prompts: Sequence[ShownPrompt]
    tally: Tally
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The id of the answer."""
        return f"{_CHAT_ID if self.wanted.is_chat else _COMPLETION_ID}{self.request_id}"

    def head(self, kind: str) -> dict[str, object]:
        """The first members of an answer or a chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
