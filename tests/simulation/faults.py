"""Corrupt results that the core must reject. Owns nothing; draws from the caller's generator."""

import random

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb


def corrupt(rng: random.Random, result: pb.StepResult, *, vocab_size: int) -> None:
    """Changes a result so that it fits no plan, or names tokens outside the vocabulary."""
    match rng.choice(["status", "status", "step", "generation", "short", "token", "outside", "logprobs", "prompt"]):
        case "status":
            # Skipped, although no earlier step failed.
            result.status = pb.STEP_STATUS_SKIPPED
        case "step":
            # Not the next step: a stamped copy of a result could be a valid result of that one.
            result.step += 2
        case "generation":
            result.generation += 1
        case "short":
            result.tokens = result.tokens[:-4]
        case "token" if result.tokens:
            result.tokens = result.tokens[:-4] + np.array([vocab_size], "<i4").tobytes()
        case "logprobs":
            _corrupt_logprobs(rng, result.logprobs, vocab_size)
        case "prompt":
            _corrupt_logprobs(rng, result.prompt_logprobs, vocab_size)
        case _:
            result.nonfinite = np.array([rng.choice([-1, len(result.tokens) // 4])], "<i4").tobytes()


def _corrupt_logprobs(rng: random.Random, logprobs: pb.Logprobs, vocab_size: int) -> None:
    match rng.choice(["more", "less", "wider", "outside"]):
        case "less" if logprobs.logprobs:
            logprobs.logprobs = logprobs.logprobs[:-4]
        case "wider" if logprobs.logprobs:
            logprobs.top_k += 1
        case "outside" if logprobs.top_token_ids:
            logprobs.top_token_ids = np.full(len(logprobs.top_token_ids) // 4, vocab_size, "<i4").tobytes()
        case _:
            logprobs.logprobs += bytes(4)
