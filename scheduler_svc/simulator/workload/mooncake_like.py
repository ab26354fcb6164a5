"""Writes a synthetic trace in Mooncake's format, with the size and the shape of the published one.

Owns the shape: conversations with turns that repeat all blocks of the turns before, a few system prompts, heavy-tailed
inputs of 8.6 k tokens on average, outputs of 180, 23,608 requests in an hour. The published trace is not part of this
repository, so figures from this one resemble the published trace's but do not equal them.
"""

import json
import math
from pathlib import Path

import numpy as np

from scheduler_svc.simulator.workload.traces import BLOCK_TOKENS

REQUESTS = 23_608
SECONDS = 3600.0
_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 8, 2
# The share of requests that continue a conversation, and of conversations that start with a system prompt.
_FOLLOW_SHARE, _SYSTEM_SHARE = 0.42, 0.5
# Conversations that may still continue.
_OPEN = 600
_MAX_INPUT, _MAX_OUTPUT = 120_000, 2_000
# Lognormal mean and sigma of the new tokens of a first turn, of a later turn, and of an output.
_FIRST, _LATER, _OUTPUT = (6_450.0, 1.15), (1_900.0, 1.0), (186.0, 0.9)


def write_trace(path: Path, *, requests: int = REQUESTS, seconds: float = SECONDS, seed: int = 0) -> None:
    """Writes one line per request, in order of time. Raises OSError, FileExistsError if the file exists."""
    rng = np.random.default_rng([seed, requests])
    moments = np.sort(rng.uniform(0, 1e3 * seconds, requests)).astype(np.int64)
    next_id = _SYSTEM_PROMPTS * _SYSTEM_BLOCKS
    # The block ids of each conversation, the newest last.
    conversations: list[list[int]] = []
    with path.open("x", encoding="utf-8") as file:
        for moment in moments.tolist():
            # The newest conversations are the likeliest to continue.
            back = min(len(conversations), 1 + int(rng.exponential(_OPEN / 4)))
            room = _MAX_INPUT - BLOCK_TOKENS * len(conversations[-back]) if back else 0
            follows = room > 0 and rng.random() < _FOLLOW_SHARE
            if not follows:
                conversations = [*conversations[1 - _OPEN :], _system_blocks(rng)]
            blocks = conversations[-back if follows else -1]
            known = BLOCK_TOKENS * len(blocks)
            fresh = _length(rng, _LATER if follows else _FIRST, _MAX_INPUT - known)
            blocks += range(next_id, next_id + -(-fresh // BLOCK_TOKENS))
            next_id += -(-fresh // BLOCK_TOKENS)
            line = {
                "timestamp": moment,
                "input_length": known + fresh,
                "output_length": _length(rng, _OUTPUT, _MAX_OUTPUT),
                "hash_ids": blocks,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _system_blocks(rng: np.random.Generator) -> list[int]:
    if rng.random() >= _SYSTEM_SHARE:
        return []
    first = int(rng.integers(_SYSTEM_PROMPTS)) * _SYSTEM_BLOCKS
    return list(range(first, first + _SYSTEM_BLOCKS))


def _length(rng: np.random.Generator, shape: tuple[float, float], limit: int) -> int:
    mean, sigma = shape
    return int(min(limit, max(1.0, float(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma)))))
