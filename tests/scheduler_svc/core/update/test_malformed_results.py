"""Results that fit no plan: the worker is refused for now, and its requests go on without the loss of a token."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from tests.scheduler_svc.core.world import World, prompt


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


# What becomes of a field's value.
OF_LOGPROBS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "too few logprobs": ("logprobs", lambda old: old[:-4]),
    "too many logprobs": ("logprobs", lambda old: old + bytes(4)),
    "another top_k": ("top_k", lambda old: old + 1),
    "too few token ids": ("top_token_ids", lambda old: old[4:]),
    "too many top logprobs": ("top_logprobs", lambda old: old + bytes(4)),
    "token ids outside the vocabulary": ("top_token_ids", lambda old: ints(*[288] * (len(old) // 4))),
}
KINDS = ("logprobs", "prompt_logprobs")
SPOILED: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "no tokens": ("tokens", lambda _: b""),
    "a token out of range": ("tokens", lambda _: ints(2**30)),
    **{f"row {row} not finite": ("nonfinite", lambda _, row=row: ints(row)) for row in (-1, 1, 2**31 - 1)},
    "a constraint complete where there is none": ("constraint_complete", lambda _: ints(0)),
    "the NaN logprob of a finite row": ("logprobs.logprobs", lambda _: np.array([np.nan], "<f4").tobytes()),
    **{f"no {kind}": (kind, None) for kind in KINDS},
    **{
        f"{kind}: {what}": (f"{kind}.{field}", change)
        for kind in KINDS
        for what, (field, change) in OF_LOGPROBS.items()
    },
}


def spoil(result: pb.StepResult, field: str, change: Callable[[Any], Any] | None) -> None:
    """Changes a field, or clears it (None)."""
    outer, _, name = field.rpartition(".")
    message = getattr(result, outer) if outer else result
    if change is None:
        message.ClearField(name)
    else:
        setattr(message, name, change(getattr(message, name)))


def answered(world: World) -> pb.StepResult:
    """Lets the worker apply the first plan, and returns its result, which is not delivered."""
    world.tick()
    world.apply()
    return world.results[0]


def check_refused(world: World, stream: int) -> None:
    world.deliver()
    assert world.is_lost and world.streams[stream].tokens == []
    refused = world.effects[-1]
    assert isinstance(refused, fx.WorkerRefused) and (refused.worker, refused.retry) == (world.worker, True)
    world.join()
    world.finish()
    assert len(world.streams[stream].tokens) == 3


def ask(world: World, **options: Any) -> int:
    return world.submit(prompt(5), max_new_tokens=3, ignore_eos=True, **options)


@pytest.mark.parametrize(("field", "change"), SPOILED.values(), ids=SPOILED)
def test_a_malformed_result_refuses_the_worker(world: World, field: str, change: Callable[[Any], Any] | None) -> None:
    stream = ask(world, num_logprobs=3, prompt_logprobs_from=1)
    spoil(answered(world), field, change)
    check_refused(world, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_that_nobody_wants_are_refused(world: World, kind: str) -> None:
    stream = ask(world)
    getattr(answered(world), kind).logprobs = bytes(4)
    check_refused(world, stream)


def test_malformed_logprobs_are_refused_even_if_another_row_is_nonfinite(world: World) -> None:
    ask(world)
    stream = world.submit(prompt(5, 1), max_new_tokens=3, ignore_eos=True, num_logprobs=3)
    result = answered(world)
    result.nonfinite, result.logprobs.top_token_ids = ints(0), ints(288, 288)
    check_refused(world, stream)
