"""Random requests of an episode: what callers may ask for, in all its corners.

Owns nothing; draws from the generator that it is given.
"""

import random

import numpy as np

from scheduler_svc.core import events as ev
from tests.rigs.executor import Shape
from tests.rigs.sampling import MINUS_INFINITY


def random_submit(rng: random.Random, shape: Shape, *, frontend: str, stream: int, doomed: list[int]) -> ev.Submit:
    """A request whose first stream is `stream`; the `doomed` tokens stand somewhere in its prompt."""
    prompt = [rng.randrange(4) for _ in range(rng.choice([1, 1, 2, 3, 4, 5, 8, rng.randint(1, 20)]))]
    for token in doomed:
        prompt[rng.randrange(len(prompt))] = token
    max_new_tokens = rng.choice([1, 1, 2, 3, 5, 8, 12])
    min_new_tokens = rng.choice([0, 0, min(1, max_new_tokens), max_new_tokens])
    stops, ignore_eos = rng.choice([(), (), (1,), (1, 2)]), rng.random() < 0.5
    too_early = {*stops, *(() if ignore_eos else shape.eos_token_ids)} if min_new_tokens else set[int]()
    extras = random_extras(rng, shape, too_early) if rng.random() < 0.4 else None
    plain = rng.random() < 0.5
    return ev.Submit(
        frontend=frontend,
        stream=stream,
        request_id=f"r{stream}",
        prompt=np.array(prompt, np.int32),
        sampling=ev.Sampling(
            temperature=rng.choice([0.0, 1.0]),
            top_p=1.0 if plain else rng.choice([0.5, 0.9]),
            top_k=0 if plain else rng.choice([1, 40]),
            min_p=0.0 if plain else rng.choice([0.1, 0.2]),
            seed=rng.randrange(5),
            extras=extras,
        ),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_token_ids=stops,
        ignore_eos=ignore_eos,
        priority=rng.choice([0, 0, 0, -1, 1, 2]),
        max_time_seconds=rng.choice([0, 0, 0, 0, 0.5, 3.0]),
        deadline_seconds=rng.choice([0, 0, 0, 0, 0.5, 3.0]),
        num_samples=rng.choice([1, 1, 1, 1, 1, 1, 2, 3, 7]),
        prompt_logprobs_from=rng.randint(1, len(prompt)) if rng.random() < 0.25 else 0,
    )


def random_extras(rng: random.Random, shape: Shape, too_early: set[int]) -> ev.Extras:
    """What few ask for; one token always remains that is neither banned nor among `too_early`."""

    def sometimes(*values: float) -> float:
        return rng.choice(values) if rng.random() < 0.3 else 0.0

    vocabulary = range(shape.sampled_vocab)
    kept = rng.choice([token for token in vocabulary if token not in too_early])
    biased = [token for token in vocabulary if token != kept and rng.random() < 0.3] if rng.random() < 0.4 else []
    biases = [rng.choice([MINUS_INFINITY, -1.5, 0.25, 100.0]) for _ in biased]
    allowed = [token for token in vocabulary if token == kept or rng.random() < 0.5] if rng.random() < 0.3 else []
    return ev.Extras(
        presence_penalty=sometimes(-2.0, 0.5, 2.0),
        frequency_penalty=sometimes(-1.0, 0.1),
        repetition_penalty=sometimes(0.5, 1.3) or 1.0,
        biased=np.array(biased, np.int32),
        biases=np.array(biases, np.float32),
        allowed=np.array(allowed, np.int32),
        num_logprobs=rng.choice([0, 1, 2, 4, 6]),
    )
