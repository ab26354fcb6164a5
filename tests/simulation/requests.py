"""Random requests of an episode, with every field at its edges.

Owns nothing; draws from the caller's generator.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.names import core_id
from tests.rigs.executor import Shape
from tests.rigs.resources import are_known, resources_of, source_of
from tests.rigs.sampling import MINUS_INFINITY, Settings
from tests.rigs.session_log import over_the_wire
from tests.scheduler_svc.core.world import hashes_of
from tests.simulation.lingering import SECRET_HASH
from tests.simulation.setting import KILLER, LETHAL, POISON, Setting

_ADAPTED_SHARE = 0.3


def random_prompt(rng: random.Random, setting: Setting, histories: Sequence[Sequence[int]]) -> list[int]:
    """Usually begins like another prompt: a stem, whole, up to a page's end or cut anywhere, or an earlier history."""
    tail = [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 2, 4]))]
    kind = rng.random()
    if kind < 0.2:
        prompt = [rng.randrange(4) for _ in range(rng.choice([1, 1, 2, 3, 4, 5, 8, rng.randint(1, 20)]))]
    elif kind < 0.85 or not histories:
        stem, size = rng.choice(setting.stems), setting.shape.page_size
        end = rng.choice([len(stem), len(stem) // size * size, rng.randint(1, len(stem))])
        prompt = [*stem[:end], *tail]
    else:
        prompt = [*rng.choice(histories), *tail]
    for token, share in (
        (POISON, setting.poison_share),
        (KILLER, setting.killer_share),
        (LETHAL, setting.lethal_share),
    ):
        if prompt and rng.random() < share:
            prompt[rng.randrange(len(prompt))] = token
    return prompt[:40] or [rng.randrange(4)]


def random_submit(
    rng: random.Random, setting: Setting, *, frontend: str, stream: int, histories: Sequence[Sequence[int]]
) -> ev.Submit:
    """Draws a request. `stream` numbers its first stream; `histories` are prompts and outputs of earlier ones."""
    shape, prompt = setting.shape, random_prompt(rng, setting, histories)
    max_new_tokens = rng.choice(setting.max_new_tokens)
    min_new_tokens = rng.choice([0, 0, min(1, max_new_tokens), max_new_tokens])
    stops, ignore_eos = rng.choice([(), (), (1,), (1, 2)]), rng.random() < 0.5
    too_early = {*stops, *(() if ignore_eos else shape.eos_token_ids)} if min_new_tokens else set[int]()
    is_rich = rng.random() < 0.3
    constraint = random_constraint(rng) if rng.random() < setting.constrained_share else b""
    if constraint:
        min_new_tokens, ignore_eos, too_early = 0, False, set()
    edits = random_edits(rng, shape, too_early) if is_rich and not constraint else {}
    num_logprobs = rng.choice([0, 1, 2, 4, 6]) if is_rich else 0
    plain, is_shared = rng.random() < 0.5, rng.random() < 0.95
    tenant, salt = rng.choice(setting.tenants), rng.choice(setting.salts)
    hashes = hashes_of(prompt, shape.page_size, salt=salt, tenant=tenant) if is_shared else {}
    prompt_logprobs_from = rng.randint(1, len(prompt)) if rng.random() < 0.2 else 0
    # Logprobs are not kept.
    lingers = not num_logprobs and not prompt_logprobs_from and rng.random() < 0.4
    linger_seconds = rng.choice([0.3, 3.0, 1000.0]) if lingers else 0.0
    event = ev.Submit(
        frontend=frontend,
        stream=stream,
        request_id=core_id(tenant, f"r{stream}"),
        prompt=np.array(prompt, np.int32),
        sampling=Settings(
            temperature=rng.choice([0.0, 1.0]),
            top_p=1.0 if plain else rng.choice([0.5, 0.9]),
            top_k=0 if plain else rng.choice([1, 40]),
            min_p=0.0 if plain else rng.choice([0.1, 0.2]),
            seed=rng.randrange(5),
            **edits,
        ).encoded(),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_token_ids=stops,
        ignore_eos=ignore_eos,
        priority=rng.choice([0, 0, 0, -1, 1, 2]),
        max_time_seconds=rng.choice([0, 0, 0, 0, 0.5, 3.0]),
        deadline_seconds=rng.choice([0, 0, 0, 0, 0.5, 3.0]),
        num_samples=rng.choice([1, 1, 1, 1, 1, 2, 3, 7]),
        num_logprobs=num_logprobs,
        prompt_logprobs_from=prompt_logprobs_from,
        cache_read=rng.random() >= setting.bypass_share,
        cache_write=rng.random() >= setting.bypass_share,
        linger_seconds=linger_seconds,
        max_queue_seconds=rng.choice([0, 0, 0, 0.5, 3.0]) if tenant else 0.0,
        tenant=tenant,
        secret_hash=SECRET_HASH if linger_seconds else b"",
        resources=resources_of(constraint),
        **hashes,
    )
    return over_the_wire(with_adapter(without_maximum(event, setting)))


def without_maximum(event: ev.Submit, setting: Setting) -> ev.Submit:
    """Returns some requests as if their callers had left the maximum unset: the rest of the context, or a default.

    Draws from the stream's own generator, so that the other requests of a seed stay as they are.
    """
    rng = random.Random(f"maximum of {event.stream}")
    if rng.random() >= setting.unset_share:
        return event
    rest = max(1, setting.shape.max_length - len(event.prompt))
    default = event.max_new_tokens if rng.random() < 0.2 else rest
    return replace(event, is_max_unset=True, max_new_tokens=max(default, event.min_new_tokens, 1))


def with_adapter(event: ev.Submit) -> ev.Submit:
    """Returns some requests with an adapter, where adapters are known; few different ones, as many as have room.

    Draws from the stream's own generator, so that the other requests of a seed stay as they are.
    """
    rng = random.Random(f"adapter of {event.stream}")
    if not are_known() or rng.random() >= _ADAPTED_SHARE:
        return event
    refused = " toy_refuse" if rng.random() < 0.05 else ""
    source = f"adapter {rng.randrange(4)}{refused}".ljust(60).encode()
    return replace(event, resources=resources_of(source_of(event), source))


def random_constraint(rng: random.Random) -> bytes:
    """Draws a source of the toy matcher; few different ones, so that several requests often have the same."""
    word = rng.choice(["", "", "toy_complete=1", "toy_complete=5", "toy_complete=9", "toy_fail=1", "toy_fail=3"])
    return f"{rng.randrange(3)} {word}{' toy_refuse' if rng.random() < 0.05 else ''}".encode()


def random_edits(rng: random.Random, shape: Shape, too_early: set[int]) -> dict[str, Any]:
    """Settings that few requests have; one token always remains that is neither banned nor among `too_early`."""

    def sometimes(*values: float) -> float:
        return rng.choice(values) if rng.random() < 0.3 else 0.0

    vocabulary = range(shape.sampled_vocab)
    kept = rng.choice([token for token in vocabulary if token not in too_early])
    biased = [token for token in vocabulary if token != kept and rng.random() < 0.3] if rng.random() < 0.4 else []
    biases = [rng.choice([MINUS_INFINITY, -1.5, 0.25, 100.0]) for _ in biased]
    allowed = [token for token in vocabulary if token == kept or rng.random() < 0.5] if rng.random() < 0.3 else []
    return {
        "presence_penalty": sometimes(-2.0, 0.5, 2.0),
        "frequency_penalty": sometimes(-1.0, 0.1),
        "repetition_penalty": sometimes(0.5, 1.3) or 1.0,
        "biases": tuple(zip(biased, biases, strict=True)),
        "allowed": frozenset(allowed),
    }
