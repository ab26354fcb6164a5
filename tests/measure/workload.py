"""The workloads of every engine: prompts, output lengths, and a model of random weights.

Owns the workloads' definitions and the model's files. Making the model needs torch, so it runs in a process of its own.
"""

import itertools
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tandem_contract.files import cache_dir
from tests.measure import call
from tests.rigs.byte_tokenizer import byte_characters, byte_level_json

# Small enough for a CPU core, shaped like real models.
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODEL_SEED = 0
MODEL_LINE = "Qwen3 shape, hidden 512, 8 layers, 8 heads, 4 KV heads of 64, vocabulary 8,192, random weights, f32"
CONCURRENT = 32
PAGE_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Greedy completions with end of sequence ignored, of which `concurrent` run at a time."""

    prompts: list[list[int]]
    output_lengths: list[int]
    concurrent: int = CONCURRENT
    # Each of `concurrent` callers sends its next request when its last one has ended. False: all are sent at once.
    is_closed: bool = False

    @property
    def max_length(self) -> int:
        """The longest possible sequence in tokens, rounded up to a page."""
        longest = max(map(len, self.prompts)) + max(self.output_lengths)
        return -(-longest // PAGE_SIZE) * PAGE_SIZE

    @property
    def short_prompts(self) -> list[list[int]]:
        """Prompts of an unmeasured round, none of which begins with a page of a measured one."""
        return [prompt[::-1] for prompt in self.prompts[:4]]

    def first_round(self, new_tokens: int) -> "Workload":
        """Returns the requests that run first, with fewer new tokens, for an unmeasured round or a choice."""
        prompts = self.prompts[: self.concurrent]
        return replace(self, prompts=prompts, output_lengths=[new_tokens] * len(prompts))

    def first_requests(self, count: int) -> "Workload":
        """Returns the first requests of the stream, by the same callers. Raises ValueError."""
        if not 1 <= count <= len(self.prompts):
            raise ValueError(f"{count} requests of a workload of {len(self.prompts)}")
        return replace(self, prompts=self.prompts[:count], output_lengths=self.output_lengths[:count])

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    def description(self) -> str:
        """Returns one line of text."""
        lengths = list(map(len, self.prompts))
        if self.is_closed:
            sent = f"{self.concurrent} callers, each sends its next request when its last one has ended"
        else:
            sent = f"all sent at once, {self.concurrent} running"
        return (
            f"{len(lengths)} requests, {min(lengths)} to {max(lengths)} tokens in, {min(self.output_lengths)} to "
            f"{max(self.output_lengths)} out, {sent}"
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Workload":
        return cls(**json.loads(path.read_text()))


def mixed_lengths() -> Workload:
    """Returns workload 1: 64 requests of 32 to 256 tokens in and out, all at once, 32 running."""
    r = random.Random(0)
    prompts = [[r.randint(4, 8191) for _ in range(r.randint(32, 256))] for _ in range(64)]
    return Workload(prompts=prompts, output_lengths=[r.randint(32, 256) for _ in range(64)])


def long_prompts() -> Workload:
    """Returns workload 2: 64 requests of 1,024 tokens in and 64 out from 8 callers."""
    r = random.Random(2)
    prompts = [[r.randint(4, 8191) for _ in range(1024)] for _ in range(64)]
    return Workload(prompts=prompts, output_lengths=[64] * 64, concurrent=8, is_closed=True)


def one_request() -> Workload:
    """Returns workload 3: one request of 128 tokens in and 256 out."""
    r = random.Random(3)
    return Workload(prompts=[[r.randint(4, 8191) for _ in range(128)]], output_lengths=[256], concurrent=1)


WORKLOADS = {1: mixed_lengths, 2: long_prompts, 3: one_request}


def quick() -> Workload:
    """Returns the workload of a smoke test with meaningless figures."""
    r = random.Random(1)
    prompts = [[r.randint(4, 8191) for _ in range(r.randint(16, 64))] for _ in range(40)]
    return Workload(prompts=prompts, output_lengths=[r.randint(8, 32) for _ in range(40)])


def model_folder() -> Path:
    """Returns the model's folder; the first call makes the model."""
    cache = cache_dir("benchmarks")
    folder = cache / "qwen3-512x8-2048-seed0"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", *call.words("workload.make_model", folder=str(folder))], check=True)
    return folder


def tokenizer_json(vocab_size: int, letters: int) -> bytes:
    """Token ids 0 to 255 are bytes, the others words of so many letters, so that the service decodes real text."""
    words = itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=letters)
    pieces = [*byte_characters(), *("Ġ" + "".join(word) for word in itertools.islice(words, vocab_size - 256))]
    return byte_level_json({piece: token for token, piece in enumerate(pieces)}, [])


def save_tokenizer(folder: Path, vocab_size: int, *, letters: int) -> None:
    (folder / "tokenizer.json").write_bytes(tokenizer_json(vocab_size, letters))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def make_model(folder: str) -> None:
    """Writes weights, config and tokenizer, as `save_pretrained` does."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(MODEL_SEED)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).float().save_pretrained(folder)
    save_tokenizer(Path(folder), MODEL["vocab_size"], letters=3)
    (Path(folder) / "complete").touch()
