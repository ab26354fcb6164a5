"""A tokenizer of 131 tokens, constraints over it, and llguidance itself as the truth about masks.

Owns a driver that follows rows of `Constraints` and, beside it, matchers in this process.
"""

import hashlib
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import llguidance
import numpy as np
from numpy.typing import NDArray

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.frames import Sizes
from gpu_worker.constraints.rows import ConstrainedRow, Fate
from gpu_worker.constraints.watch import DEFAULT_LIMITS, Limits
from tests.rigs.byte_tokenizer import byte_characters, byte_level_json
from tests.rigs.waiting import TIMEOUT_SECONDS

# As of the models of the worker's rigs.
VOCAB_SIZE = 131
_BYTES = [b"\n", *(bytes([byte]) for byte in range(0x20, 0x7F))]
_PIECES = [
    b"ab",
    b"abc",
    b'{"',
    b'":',
    b'"}',
    b'",',
    b"true",
    b"false",
    b"null",
    b"12",
    b"00",
    b"  ",
    b"\n\n",
    b"yes",
    b"no",
    b"xx",
]
TOKENS = [*_BYTES, *_PIECES]
# Ids after it have no token, as in models with padded vocabularies.
EOS = len(TOKENS)
SIZES = Sizes(max_rows=8, vocab_size=VOCAB_SIZE, max_length=128)

OBJECT = llguidance.LLMatcher.grammar_from_json_schema(
    json.dumps(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "bc"]}, "ok": {"type": "boolean"}, "size": {"type": "integer"}},
            "required": ["kind", "ok", "size"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    )
)
WORD = llguidance.LLMatcher.grammar_from_regex("[a-f]{3,9}")
CHOICE = llguidance.LLMatcher.grammar_from_regex("yes|no|nothing")
SUM = 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'
ALL = (OBJECT, WORD, CHOICE, SUM)
# Its first mask is cheap. After the first token all is forced, which takes some 0.1 s.
SLOW_LATER = llguidance.LLMatcher.grammar_from_regex("[ab]((x{1000}){1000}){1000}")
# Some 0.8 s for the first mask.
SLOW_AT_ONCE = llguidance.LLMatcher.grammar_from_regex("((x{1000}){1000}){1000}")


def tokenizer_json() -> bytes:
    """One token per byte, pieces of several, and EOS."""
    characters = byte_characters()
    vocab = {"".join(characters[byte] for byte in text): token for token, text in enumerate(TOKENS)}
    vocab["<eos>"] = EOS
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return byte_level_json(vocab, [{"id": EOS, "content": "<eos>", **flags}])


def text_of(tokens: Sequence[int]) -> str:
    """The text without EOS."""
    return b"".join(TOKENS[token] for token in tokens if token != EOS).decode()


def hash_of(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()


def own_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer_json().decode(), n_vocab=VOCAB_SIZE, eos_token=[EOS])


def mask_of(matcher: llguidance.LLMatcher) -> NDArray[np.int32]:
    """int32 [words]: the bits of tokens; llguidance adds a word."""
    return np.frombuffer(matcher.compute_bitmask(), np.int32)[: SIZES.mask_words]


def allowed(mask: NDArray[np.int32]) -> list[int]:
    return [token for token in bits(mask) if token < VOCAB_SIZE]


def bits(words: NDArray[np.int32]) -> list[int]:
    """The numbers of the bits that are set."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def masks_of(constraints: Constraints, *rows: int | ConstrainedRow) -> list[list[int]]:
    """The tokens that each row allows now; none for one that has failed."""
    own = [constraints.row(row) if isinstance(row, int) else row for row in rows]
    masks = np.zeros((len(own), SIZES.mask_words), np.int32)
    constraints.masks(own, masks)
    return [allowed(mask) for mask in masks]


def serving(limits: Limits = DEFAULT_LIMITS, eos: Sequence[int] = (EOS,)) -> "closing[Constraints]":
    return closing(Constraints(tokenizer_json(), SIZES, eos, limits))


def serving_process(constraints: Constraints) -> int:
    """The child of the process that forks."""
    pid = constraints._supervisor._server._forks.pid
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def kill_server(constraints: Constraints, *, everything: bool) -> None:
    """Kills the serving process, or the one that forks it, and waits until it is gone."""
    pid = constraints._supervisor._server._forks.pid if everything else serving_process(constraints)
    assert pid is not None
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], TIMEOUT_SECONDS)[0]
    os.close(process)


def prepare(constraints: Constraints, *sources: str) -> dict[str, str]:
    """Prepares them together. Returns the answers, by source."""
    names = {hash_of(source): source for source in sources}
    for hash_, source in names.items():
        constraints.prepare(hash_, source.encode())
    answers: dict[str, str] = {}
    until = time.monotonic() + 60
    while len(answers) < len(names):
        assert time.monotonic() < until, "no answer"
        for hash_, error in constraints.answers():
            assert names[hash_] not in answers
            answers[names[hash_]] = error
        time.sleep(0.001)
    return answers


@dataclass(kw_only=True)
class Walk:
    """Rows that take random allowed tokens, each beside a matcher of this process that says what is right."""

    constraints: Constraints
    sources: Sequence[str]
    seed: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        tokenizer = own_tokenizer()
        self._truth = {
            row: llguidance.LLMatcher(tokenizer, text, log_level=0) for row, text in enumerate(self.sources, 1)
        }
        for row, source in enumerate(self.sources, 1):
            self.outputs[row] = []
            self.constraints.start(row, hash_of(source), np.zeros(0, np.int32))

    @property
    def failed(self) -> list[ConstrainedRow]:
        return [own for own in map(self.constraints.row, self.outputs) if own.fate is Fate.FAILED]

    @property
    def open_rows(self) -> list[ConstrainedRow]:
        return [own for own in map(self.constraints.row, self.outputs) if own.fate is Fate.OPEN]

    def step(self) -> None:
        """Every open row gets a token. Its mask must be the truth, and so must its end."""
        rows = self.open_rows
        tokens: list[int] = []
        for own, found in zip(rows, masks_of(self.constraints, *rows), strict=True):
            truth = self._truth[own.row]
            assert own.fate is Fate.OPEN, own.detail
            assert found == allowed(mask_of(truth)), text_of(self.outputs[own.row])
            tokens.append(int(self._rng.choice(found)))
            self.outputs[own.row].append(tokens[-1])
            assert truth.consume_token(tokens[-1])
        self.constraints.learn(zip(rows, tokens, strict=True))
        for own, token in zip(rows, tokens, strict=True):
            is_complete = token != EOS and self._truth[own.row].is_stopped()
            assert (own.fate is Fate.COMPLETE) == is_complete

    def run(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.open_rows:
                return
            self.step()
