"""Random requests of the chaos run, each with the oracle's answer. Knows nothing of streams or faults."""

import random
from typing import Any

from tandem.v1 import inference_pb2 as pb

from tests.rigs import byte_tokenizer
from tests.system.asks import Ask

MAX_LENGTH = 320
LINGER_SECONDS = 120.0
# Tokens that no sampled output contains, and what each does to the worker that computes it.
POISONS = {"nonfinite-token": byte_tokenizer.POISON_ID, "kill-token": 281, "hang-token": 282, "fail-token": 283}
_STOPS = (" the", "ab", "é", "日", "x", "STOP", "OP", "\n\n", "0", "q")


def random_ask(rng: random.Random, name: str, *, poison: int | None = None, resumes: bool = True) -> Ask:
    """A request of any kind, with at most MAX_LENGTH tokens. The prompt contains the token `poison` if it is set.

    A request that `resumes` lingers, and has no logprobs.
    """
    prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 4, 8, 30, 60, 100]))]
    if poison is not None:
        prompt[rng.randrange(len(prompt))] = poison
    length = rng.choice([1, 2, 10, 40, 90, 150, 200])
    wants_logprobs = not resumes and rng.random() < 0.3
    return Ask(
        # The prompt ends in a letter, so that the output's text is decoded independently of it.
        prompt=(*prompt, ord("a")),
        max_new_tokens=length,
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(1 << 64),
        ignore_eos=rng.random() < 0.7,
        min_new_tokens=rng.choice([0, 0, 1, length]),
        stop_token_ids=tuple(rng.sample(range(256), 3)) if rng.random() < 0.15 else (),
        stop_strings=tuple(rng.sample(_STOPS, 3)) if rng.random() < 0.15 else (),
        include_stop=rng.random() < 0.5,
        priority=rng.choice([0, 0, 0, 5, -5]),
        request_id=name,
        num_samples=rng.choice([1, 1, 1, 1, 1, 1, 2, 4]),
        logprobs=rng.choice([0, 1, 20]) if wants_logprobs else None,
        prompt_logprobs_start=rng.randrange(len(prompt) + 1) if not resumes and rng.random() < 0.1 else None,
        extra=_resuming() if resumes else pb.GenerateRequest(),
        **_random_settings(rng) if rng.random() < 0.3 else {},
    )


def _resuming() -> pb.GenerateRequest:
    return pb.GenerateRequest(resume=pb.ResumeParams(linger_seconds=LINGER_SECONDS))


def _random_settings(rng: random.Random) -> dict[str, Any]:
    """Random sampling settings; enough tokens are allowed that bans leave some."""
    return {
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 5]),
        "min_p": rng.choice([0.0, 0.1]),
        "typical_p": rng.choice([1.0, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.5, -2.0]),
        "frequency_penalty": rng.choice([0.0, 1.1]),
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "logit_bias": tuple((token, rng.choice([-100.0, 1.5])) for token in rng.sample(range(256), 3)),
        "banned_token_ids": tuple(rng.sample(range(256), 5)) if rng.random() < 0.5 else (),
        "allowed_token_ids": tuple(rng.sample(range(256), 40)) if rng.random() < 0.5 else (),
    }
