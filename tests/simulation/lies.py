"""Results that no core may believe. Owns nothing; draws from the generator that it is given."""

import random

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb


def corrupt(rng: random.Random, result: pb.StepResult, *, vocab_size: int) -> None:
    """Changes a result so that it fits no plan, or is none of this model's."""
    match rng.choice(["status", "status", "step", "generation", "short", "token", "outside", "logprobs", "prompt"]):
        case "status":
            # Without a failed step before it.
            result.status = pb.STEP_STATUS_SKIPPED
        case "step":
            # Not the next: a copy of what the core has heard, so stamped, is what that step might have said.
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


def _corrupt_logprobs(rng: random.Random, told: pb.Logprobs, vocab_size: int) -> None:
    match rng.choice(["more", "less", "wider", "outside"]):
        case "less" if told.logprobs:
            told.logprobs = told.logprobs[:-4]
        case "wider" if told.logprobs:
            told.top_k += 1
        case "outside" if told.top_token_ids:
            told.top_token_ids = np.full(len(told.top_token_ids) // 4, vocab_size, "<i4").tobytes()
        case _:
            told.logprobs += bytes(4)
