"""Workers that may not serve, or no longer: another identity or window, hanging steps, wrong results."""

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.worker_info import WorkerInfo
from tests.scheduler_svc.core.world import World, greedy


def prompt(length: int) -> list[int]:
    return [(7 * i) % 250 for i in range(length)]


def test_a_worker_of_another_identity_is_refused_and_one_of_the_same_joins() -> None:
    world = World()
    info = world.info()
    other = WorkerInfo(**{name: getattr(info, name) for name in info.__slots__} | {"identity": "else"})
    note, refused = world.handle(ev.WorkerJoined(worker="w-x", info=other))
    assert isinstance(note, fx.Note)
    assert isinstance(refused, fx.WorkerRefused)
    assert not refused.retry
    second = world.handle(ev.WorkerJoined(worker="w-y", info=info))[0]
    assert isinstance(second, fx.WorkerAccepted)
    assert list(world.core.lanes) == [world.worker, "w-y"]


def test_a_worker_with_another_window_is_refused_for_good() -> None:
    world = World()
    info = world.info()
    other = WorkerInfo(**{name: getattr(info, name) for name in info.__slots__} | {"window": 8})
    note, refused = world.handle(ev.WorkerJoined(worker="w-x", info=other))
    assert isinstance(note, fx.Note)
    assert isinstance(refused, fx.WorkerRefused)
    assert not refused.retry
    assert "attend to all earlier tokens; this worker attends to the last 8 and the first 0 tokens" in refused.reason


def test_a_present_worker_that_rejoins_with_another_identity_is_refused() -> None:
    world = World()
    info = world.info()
    other = WorkerInfo(
        **{name: getattr(info, name) for name in info.__slots__} | {"identity": "else", "max_length": 2, "num_pages": 2}
    )
    stream = world.submit(prompt(5), ignore_eos=True)
    world.tick()
    effects = world.handle(ev.WorkerJoined(worker=world.worker, info=other))
    assert not any(isinstance(effect, fx.ModelServed) for effect in effects)
    assert [effect.retry for effect in effects if isinstance(effect, fx.WorkerRefused)] == [False]
    assert world.lane is None
    assert world.core.info == info
    world.join()
    world.run()
    world.check_all_ended()
    assert len(world.streams[stream].tokens) == 4


def test_a_worker_that_hangs_is_dropped_and_receives_rejoin() -> None:
    world = World(config=greedy(step_timeout_seconds=3.0, silence_timeout_seconds=9.0))
    world.submit(prompt(3), ignore_eos=True)
    world.tick(1.0)
    assert world.core.next_wake() == pytest.approx(4.0)
    world.tick(3.0)
    assert world.lane is None
    assert any(isinstance(effect, fx.AskRejoin) for effect in world.effects)
    late = ev.StepDone(
        worker=world.worker, generation=1, step=1, status=ev.StepStatus.OK, detail="",
        tokens=world.streams[1].submit.prompt, nonfinite=world.streams[1].submit.prompt[:0], compute_us=0,
    )  # fmt: skip
    assert isinstance(world.handle(late)[0], fx.AskRejoin)
    world.join()
    world.run()
    world.check_all_ended()


@pytest.mark.parametrize("wrong", ["no tokens", "token out of range", "wrong step", "wrong generation"])
def test_an_invalid_result_loses_no_tokens(wrong: str) -> None:
    world = World()
    world.submit(prompt(5), ignore_eos=True, max_new_tokens=8)
    world.tick()
    world.apply()
    result = world.results[0]
    match wrong:
        case "no tokens":
            result.tokens = b""
        case "token out of range":
            result.tokens = (2**30).to_bytes(4, "little")
        case "wrong step":
            result.step += 5
        case _:
            result.generation += 5
    world.deliver()
    assert world.streams[1].tokens == []
    if world.lane is None:
        world.join()
    elif wrong == "wrong generation":
        world.kill()
        world.join()
    else:
        world.plans.clear()
    world.run()
    world.check_all_ended()


def test_a_worker_without_a_confirmed_step_is_refused_after_some_resets() -> None:
    world = World()
    world.submit(prompt(3), max_new_tokens=4, ignore_eos=True)
    resets = 0
    while world.lane is not None:
        world.tick()
        plan = world.sent[-1]
        empty = world.streams[1].submit.prompt[:0]
        world.handle(
            ev.StepDone(
                worker=world.worker, generation=plan.generation, step=plan.step, status=ev.StepStatus.OUT_OF_SYNC,
                detail="never", tokens=empty, nonfinite=empty, compute_us=0,
            )
        )  # fmt: skip
        resets += 1
        assert resets <= 10
    # Two plans are in flight and the result of the last one comes first, so no step is confirmed.
    refused = [effect for effect in world.effects if isinstance(effect, fx.WorkerRefused)]
    assert [effect.retry for effect in refused] == [True]
    assert "failed steps in a row without a confirmed one" in refused[0].reason
    world.join()
    world.run()
    world.check_all_ended()
    assert len(world.streams[1].tokens) == 4
