"""The prompt of one call as an answer shows it: its text for `echo`, its ids for logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.v1 import inference_pb2

from tandem_client.gateway.answers.logprobs import TokenLogprob, tokens_of


@dataclass(slots=True, kw_only=True)
class ShownPrompt:
    """`text` and `token_ids` are empty where the answer does not show them."""

    text: str = ""
    token_ids: Sequence[int] = ()
    # Of all tokens but the first, as far as they have come.
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    first: inference_pb2.TokenPiece | None = None

    def add(self, info: inference_pb2.PromptInfo, num_top: int) -> None:
        """Takes the next piece of the prompt's logprobs."""
        ids = self.token_ids[info.start : info.start + len(info.logprobs.logprobs)]
        self.logprobs += tokens_of(ids, info.logprobs, num_top)
        if info.HasField("first"):
            self.first = info.first

    @property
    def scored(self) -> list[TokenLogprob]:
        """All tokens; the first has no logprob."""
        # A prompt of one token has no logprobs, and that token has its text.
        piece = self.first or inference_pb2.TokenPiece(text=self.text, data=self.text.encode())
        first = [TokenLogprob(token_id, None, piece.text, piece.data) for token_id in self.token_ids[:1]]
        return first + self.logprobs
