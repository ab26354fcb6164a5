"""What one Generate stream said, and whether it said it in the promised order.

Owns the rules of order (Accepted, Deltas with contiguous offsets, one Finished, Summary last). Knows nothing of
threads, sockets or what the tokens should be.
"""

from dataclasses import dataclass, field

from tandem.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Transcript:
    """Grows with `take`; a message out of order is an AssertionError that names it."""

    accepted: pb.Accepted | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    num_deltas: int = 0
    finished: pb.Finished | None = None
    summary: pb.Summary | None = None

    def take(self, message: pb.GenerateResponse) -> None:
        """The stream's next message."""
        kind = message.WhichOneof("event")
        assert self.summary is None, f"{kind} after Summary"
        match kind:
            case "accepted":
                assert self.accepted is None, "a second Accepted"
                self.accepted = message.accepted
            case "delta":
                assert self.accepted is not None, "a Delta before Accepted"
                assert self.finished is None, "a Delta after Finished"
                delta = message.delta
                assert delta.token_ids or delta.text, "an empty Delta"
                if delta.token_ids:
                    assert delta.token_offset == len(self.tokens), (
                        f"a Delta at offset {delta.token_offset} after {len(self.tokens)} tokens"
                    )
                self.tokens.extend(delta.token_ids)
                self.text += delta.text
                self.num_deltas += 1
            case "finished":
                assert self.accepted is not None, "Finished before Accepted"
                assert self.finished is None, "a second Finished"
                assert message.finished.reason != pb.FINISH_REASON_UNSPECIFIED, "Finished without a reason"
                self.finished = message.finished
            case "summary":
                assert self.finished is not None, "Summary before Finished"
                self.summary = message.summary
            case other:
                raise AssertionError(f"a message that says nothing known: {other}")

    @property
    def reason(self) -> str:
        """`LENGTH` for FINISH_REASON_LENGTH."""
        assert self.finished is not None, "the stream is not finished"
        return pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_")
