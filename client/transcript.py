"""What one stream has told so far, and whether it keeps the API's order.

Shared by the blocking and the async stream; knows nothing of either.
"""

from tandem.v1 import inference_pb2

from client import types
from client.errors import ProtocolError
from client.types import Accepted, Delta, Finished, Summary


class Transcript:
    """Reads a stream's messages in order."""

    __slots__ = ("_num_tokens", "_with_ids", "accepted", "finished", "summary")

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.summary: Summary | None = None
        self._num_tokens = 0
        output = request.output
        self._with_ids = output.want_token_ids or not output.HasField("want_token_ids")

    def absorb(self, message: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes in one message; returns what it adds to the completion.

        Raises ProtocolError where tokens are missing or repeated: the caller must not take such a completion for whole.
        """
        match message.WhichOneof("event"):
            case "accepted":
                self.accepted = types.accepted(message.accepted)
            case "delta":
                delta = types.delta(message.delta)
                if self._with_ids and delta.token_offset != self._num_tokens:
                    raise ProtocolError(f"a delta starts at token {delta.token_offset}; {self._num_tokens} have come")
                self._num_tokens += len(delta.token_ids)
                return delta
            case "finished":
                self.finished = types.finished(message.finished)
            case "summary":
                self.summary = types.summary(message.summary)
            case _:
                pass  # An event that is newer than this client.
        return None

    def end(self) -> None:
        """The stream is over. Raises ProtocolError where its last message is missing."""
        if self.summary is None:
            raise ProtocolError("the stream ended without its Summary")
