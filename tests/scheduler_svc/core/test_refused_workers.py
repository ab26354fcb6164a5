"""Workers that may not serve, or no longer: another identity or window, hanging steps, wrong results."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS
from tests.rigs.core_events import step_done
from tests.scheduler_svc.core.world import World, prompt


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"identity": "else"}, "(identity identity); the worker has model (identity else)"),
        ({"window": 8}, "attend to all earlier tokens; this worker attends to the last 8 and the first 0 tokens"),
        (
            {"window": 8, "sink_tokens": 2},
            "this worker attends to the last 8 and the first 2 tokens",
        ),
    ],
)
def test_a_worker_of_another_identity_or_window_is_refused_for_good(change: dict[str, Any], reason: str) -> None:
    world = World()
    note, refused = world.handle(ev.WorkerJoined(worker="w-x", info=replace(world.info(), **change)))
    assert isinstance(note, fx.Note)
    assert isinstance(refused, fx.WorkerRefused) and not refused.retry
    assert reason in refused.reason
    assert isinstance(world.handle(ev.WorkerJoined(worker="w-y", info=world.info()))[0], fx.WorkerAccepted)
    assert list(world.core.lanes) == [world.worker, "w-y"]


def test_a_present_worker_that_rejoins_with_another_identity_is_refused(world: World) -> None:
    info = world.info()
    other = replace(info, identity="else", max_length=2, num_pages=2)
    stream = world.submit(prompt(5), ignore_eos=True)
    world.tick()
    effects = world.handle(ev.WorkerJoined(worker=world.worker, info=other))
    assert not any(isinstance(effect, fx.ModelServed) for effect in effects)
    assert [effect.retry for effect in effects if isinstance(effect, fx.WorkerRefused)] == [False]
    assert world.is_lost
    assert world.core.info == info
    world.join()
    world.finish()
    assert len(world.streams[stream].tokens) == 4


def test_a_worker_without_a_confirmed_step_is_refused_after_some_resets(world: World) -> None:
    world.submit(prompt(3), max_new_tokens=4, ignore_eos=True)
    resets = 0
    while not world.is_lost:
        world.tick()
        world.handle(step_done(world.worker, world.sent[-1], NO_IDS, status=ev.StepStatus.OUT_OF_SYNC, detail="never"))
        resets += 1
        assert resets <= 10
    # Two plans are in flight and the result of the last one comes first, so no step is confirmed.
    refused = world.told(fx.WorkerRefused)
    assert [effect.retry for effect in refused] == [True]
    assert "failed steps in a row without a confirmed one" in refused[0].reason
    world.join()
    world.finish()
    assert len(world.streams[1].tokens) == 4
