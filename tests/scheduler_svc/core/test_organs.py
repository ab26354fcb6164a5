"""Organs: each type of event has one handler, the README lists them, and requests run without most of them.

The README's scheduler without the organs is run as it stands there, on the events of a world of the whole scheduler.
"""

import random
import re
from functools import cache
from typing import get_args

import pytest

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.front_ends import FrontEnds
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.recovery.workers import Workers
from scheduler_svc.core.requests.acceptance import Requests, accept
from scheduler_svc.core.requests.deadlines import Deadlines
from scheduler_svc.core.scheduler import ORGANS, Scheduler
from scheduler_svc.core.steps import Steps
from tests.architecture.source import ROOT
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import World, greedy

README = (ROOT / "scheduler_svc/core/README.md").read_text()
SMALL = Shape(num_pages=12, max_rows=4)
SPINE = (Requests, Deadlines, Workers, Steps, FrontEnds)


def bare(config: CoreConfig) -> Core:
    """Returns the README's scheduler."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 60
    names = {"Core": Core, "CoreConfig": CoreConfig, "Deadlines": Deadlines, "Steps": Steps, "accept": accept}
    names |= {"ev": ev, "fx": fx}
    exec(compile(code, "core/README.md", "exec"), names)
    return names["Bare"](config)


def load(world: World, seed: int) -> None:
    """Sends requests of several kinds while others run, some of which a deadline ends; kills the worker once."""
    rng, world.audit_every = random.Random(seed), 8
    for number in range(40):
        deadline = {"max_time_seconds": rng.uniform(0.002, 0.02)} if rng.random() < 0.2 else {}
        prompt = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 30))]
        world.submit(
            prompt,
            max_new_tokens=rng.randrange(1, 12),
            num_samples=rng.choice((1, 1, 2)),
            priority=rng.choice((0, 1)),
            **deadline,
        )
        world.steps(rng.randrange(3), 0.001)
        if number == 20:
            world.restart()
    world.finish()


@cache
def whole(seed: int) -> World:
    """The world of the whole scheduler after the load, which no test changes."""
    world = World(SMALL)
    load(world, seed)
    return world


def decided(effects: list[fx.Effect]) -> list[str]:
    """Returns the effects, except for reports on the service and on waits."""
    return [repr(each) for each in effects if not isinstance(each, fx.ModelServed | fx.CoreStatus | fx.Waits)]


@pytest.mark.parametrize("seed", range(3))
def test_requests_run_without_organs_as_with_all(seed: int) -> None:
    world, spine = whole(seed), World(SMALL, organs=SPINE)
    load(spine, seed)
    assert world.core.counters.preemptions > 0
    assert any(stream.end and stream.end.reason is fx.EndReason.TIME_LIMIT for stream in world.streams.values())
    assert [repr(effect) for effect in spine.effects] == [repr(effect) for effect in world.effects]


@pytest.mark.parametrize("seed", range(3))
def test_the_readmes_scheduler_decides_what_the_whole_one_decides(seed: int) -> None:
    world, core = whole(seed), bare(greedy())
    effects = [effect for at, event in world.log for effect in core.handle(event, at)]
    assert decided(effects) == decided(world.effects)
    assert len(core.queue) == 0


def test_the_readme_lists_the_organs_in_their_order() -> None:
    table = README.split("| organ, in the order of turns |", 1)[1].split("\n\n")[0]
    listed = [(organ.__name__, organ.__module__.removeprefix("scheduler_svc.core.")) for organ in ORGANS]
    found = re.findall(r"^\| `(\w+)` \| `([\w/]+)\.py` \|", table, re.MULTILINE)
    assert [(name, path.replace("/", ".")) for name, path in found] == listed


def test_each_type_of_event_has_a_handler() -> None:
    core = Scheduler(CoreConfig())
    handled = {event for organ in core.organs for event, _ in organ.handlers}
    assert handled == set(get_args(ev.Event)) - {ev.Tick}


class Again(Organ):
    @handles(ev.Paused, ev.Abort)
    def _again(self, event: ev.Event, now: float) -> list[fx.Effect]:
        return []


class Tick(Organ):
    @handles(ev.Tick)
    def _tick(self, event: ev.Tick, now: float) -> list[fx.Effect]:
        return []


class Twice(Organ):
    @handles(ev.Abort)
    def _once(self, event: ev.Abort, now: float) -> list[fx.Effect]:
        return []

    @handles(ev.Abort)
    def _twice(self, event: ev.Abort, now: float) -> list[fx.Effect]:
        return []


@pytest.mark.parametrize(
    ("organs", "message"),
    [
        ((*ORGANS, Again), "Paused has a handler already; Again brings another"),
        ((Again, *ORGANS), "Abort has a handler already; Requests brings another"),
        ((Tick,), "Tick has a handler already; Tick brings another"),
        ((Twice,), "Abort has a handler already; Twice brings another"),
        ((Steps, Steps), "StepDone has a handler already; Steps brings another"),
    ],
)
def test_a_second_handler_of_a_type_is_refused(organs: tuple[type[Organ], ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Scheduler(CoreConfig(), organs)


def test_an_organ_that_defines_nothing_does_nothing() -> None:
    class Idle(Organ):
        pass

    world, idle = whole(0), World(SMALL, organs=(*ORGANS, Idle))
    load(idle, 0)
    assert [repr(effect) for effect in idle.effects] == [repr(effect) for effect in world.effects]
    assert [idle.core.next_wake(), Idle(idle.core).next_wake()] == [world.core.next_wake(), None]
