"""The sizes of a step's arrays. Who runs the steps of a device decides how a step's own sizes become its shape."""

from dataclasses import dataclass

from tandem_contract.plural import numbered

# Each shape is captured as one graph, which takes memory and time.
MAX_SHAPES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes of a step's arrays; those of a padded step are at least the step's own."""

    # Decode rows; 0: no decode part.
    decode: int
    # Query positions of chunks; 0: no chunks.
    prefill: int
    # Packed tokens: those of decode rows, then those of chunks.
    tokens: int
    # Rows that sample.
    samples: int
    # Whether some sample may draw; the others are greedy.
    draws: bool
    # Prompt tokens with logits, besides the samples.
    prompt_logits: int = 0

    def __str__(self) -> str:
        chunks = f"{numbered(self.tokens - self.decode, 'prompt token')}, " if self.prefill else ""
        return f"step of {chunks}{numbered(self.decode, 'row')}{'' if self.draws else ', greedy'}"
