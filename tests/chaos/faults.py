"""The table of faults that a chaos run commits, and the order in which it commits them.

A fault is tried again and again, a few times per millisecond, until it has happened: a kill waits for a worker with a
plan in flight. To add a fault, add an entry to FAULTS.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Scene(Protocol):
    """What a fault may do to the service; each call returns whether it happened."""

    def kill_worker(self) -> bool: ...
    def stop_worker(self) -> bool: ...
    def hang_step(self) -> bool: ...
    def let_worker_leave(self) -> bool: ...
    def kill_frontend(self) -> bool: ...
    def kill_scheduler(self) -> bool: ...
    def overload(self) -> bool: ...
    def send_poison(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of these is committed for `per_kills` kills."""

    name: str
    commit: Callable[[Scene], bool]
    per_kills: int


FAULTS: tuple[Fault, ...] = (
    Fault(name="kills of workers with a plan in flight", commit=lambda scene: scene.kill_worker(), per_kills=1),
    Fault(name="workers stopped in a step", commit=lambda scene: scene.stop_worker(), per_kills=50),
    Fault(name="workers hung in a step", commit=lambda scene: scene.hang_step(), per_kills=50),
    Fault(name="workers that left in order", commit=lambda scene: scene.let_worker_leave(), per_kills=50),
    Fault(name="front-end deaths", commit=lambda scene: scene.kill_frontend(), per_kills=25),
    Fault(name="scheduler deaths", commit=lambda scene: scene.kill_scheduler(), per_kills=25),
    Fault(name="poison requests", commit=lambda scene: scene.send_poison(), per_kills=25),
    Fault(name="overloads", commit=lambda scene: scene.overload(), per_kills=25),
)


def script_of(rng: random.Random, kills: int) -> list[Fault]:
    """All faults of a run in random order: each kind in its share of the kills, and at least once."""
    script = [fault for fault in FAULTS for _ in range(max(1, kills // fault.per_kills))]
    rng.shuffle(script)
    return script
