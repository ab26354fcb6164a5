"""The requests of a measured run: token-id prompts, output lengths, temperature.

Owns the workloads of the engines that this one is compared with, and their file.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tests.system.real_service import BUNDLED, prompts

# Counted in nano-vllm's bench.py; a test compares.
NANO_VLLM_TOKENS = (142_827, 133_966)
# A request's seed is its number, so that two runs draw the same noise.
_NANO_VLLM_VOCABULARY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Completions without an end of sequence; all are submitted at once."""

    prompts: list[list[int]]
    output_lengths: list[int]
    temperature: float

    def __post_init__(self) -> None:
        """Raises ValueError if a prompt has no length of its output, or a length no prompt."""
        if len(self.prompts) != len(self.output_lengths):
            raise ValueError(f"{len(self.prompts)} prompts, but {len(self.output_lengths)} output lengths")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lengths, strict=True))

    def save(self, path: Path) -> None:
        """Writes the file that client processes read."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Requests":
        return cls(**json.loads(path.read_text()))


def nano_vllm() -> Requests:
    """nano-vllm's bench.py: 256 requests of 100 to 1,024 tokens in and out; its order of draws gives its totals."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, _NANO_VLLM_VOCABULARY) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    lengths = [draw.randint(100, 1024) for _ in range(256)]
    return Requests(prompts=prompts, output_lengths=lengths, temperature=0.6)


def flex_nano_vllm() -> Requests:
    """As flex-nano-vllm describes its benchmark: 512 requests, at most 512 tokens in, 128 to 512 out.

    Its prompts are texts of its own; these are random tokens of random lengths.
    """
    draw = random.Random(1)
    prompts = [[draw.randint(4, 200_000) for _ in range(draw.randint(16, 512))] for _ in range(512)]
    return Requests(prompts=prompts, output_lengths=[draw.randint(128, 512) for _ in range(512)], temperature=0.0)


def equal_lengths(count: int, prompt: int, output: int, *, vocabulary: int) -> Requests:
    """`count` greedy requests of the same lengths."""
    draw = random.Random(2)
    prompts = [[draw.randrange(4, vocabulary) for _ in range(prompt)] for _ in range(count)]
    return Requests(prompts=prompts, output_lengths=[output] * count, temperature=0.0)


def bundled(count: int, output: int) -> Requests:
    """`count` greedy requests of the bundled model's prompts, which come again after the last one."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "model" / "tokenizer.json"))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(prompts())]
    repeated = [ids[i % len(ids)] for i in range(count)]
    return Requests(prompts=repeated, output_lengths=[output] * count, temperature=0.0)


def tiny() -> Requests:
    """More requests than rows, of different lengths."""
    draw = random.Random(3)
    prompts = [[draw.randrange(4, 500) for _ in range(draw.randint(5, 90))] for _ in range(10)]
    return Requests(prompts=prompts, output_lengths=[draw.randint(4, 20) for _ in range(10)], temperature=0.6)
