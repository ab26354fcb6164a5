"""The kinds of recorded sessions, and how each is made from a seed alone.

Owns the list. Most are episodes of the simulation, in settings in which what the kind is named for is frequent.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.rigs.executor import Shape
from tests.rigs.session_log import SessionLog
from tests.simulation.deaths import Deaths
from tests.simulation.episode import Episode
from tests.simulation.lives import Caller, Lives
from tests.simulation.setting import draw_setting

_SEEDS = 8
_OPERATIONS, _OPERATIONS_OF_LIVES, _OPERATIONS_OF_CHATS = 500, 200, 300
_CHATS, _MAX_CHAT = 4, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`make` runs a session and returns how often each event occurred in it. The first has all of `events`."""

    make: Callable[[int, SessionLog], Counter[str]]
    first_seed: int
    events: tuple[str, ...]

    @property
    def seeds(self) -> range:
        """The first is that of the default suite."""
        return range(self.first_seed, self.first_seed + _SEEDS)


def make(kind: str, seed: int, folder: Path) -> tuple[str, Counter[str]]:
    """Writes the session's logs into the folder; returns its digest, and how often each event occurred."""
    session = SessionLog(folder, f"{kind}-{seed}")
    seen = KINDS[kind].make(seed, session)
    session.close()
    return session.digest(), seen


def _episode(
    seed: int, session: SessionLog, *, updates: bool = False, crowded: bool = False, unset: float = 0.0, **setting: Any
) -> Counter[str]:
    drawn = replace(draw_setting(random.Random(seed), crowded=crowded), unset_share=unset, **setting)
    episode = Episode(seed, operations=_OPERATIONS, updates=updates, setting=drawn, session=session)
    episode.run()
    return episode.seen


def _deaths(seed: int, session: SessionLog) -> Counter[str]:
    deaths = Deaths(seed, operations=_OPERATIONS_OF_LIVES, session=session)
    deaths.run()
    return deaths.seen


def _chats(seed: int, session: SessionLog) -> Counter[str]:
    """Conversations with one system prompt; each of their turns begins with all turns before it."""
    rng, seen = random.Random(seed), Counter[str]()
    system = [rng.randrange(4) for _ in range(10)]
    turns: list[Caller | None] = [None] * _CHATS
    with TemporaryDirectory(prefix="tandem-chats-") as folder:
        lives = Lives(Path(folder) / "journal", seed, shape=Shape(num_pages=60, max_rows=3), session=session)
        try:
            lives.begin()
            for _ in range(_OPERATIONS_OF_CHATS):
                chat = rng.randrange(_CHATS)
                last = turns[chat]
                if last is not None and not last.done:
                    lives.step(rng.choice(list(lives.workers)))
                    continue
                history = system if last is None else [*last.submit.prompt.tolist(), *last.received[0]]
                prompt = [*(history if len(history) < _MAX_CHAT else system), *rng.choices(range(4), k=3)]
                turns[chat] = lives.submit(prompt, max_new_tokens=rng.randint(1, 8), linger=rng.choice([0.0, 60.0]))
                seen["turn"] += len(history) > len(system)
            lives.run()
            lives.check()
        finally:
            lives.close()
    ends = [caller.ends[0] for caller in lives.callers]
    seen["turn found in the cache"] = sum(end is not None and end.stats.cached_prompt_tokens > 10 for end in ends)
    return seen


def _kind(first_seed: int, *events: str, make: Any = _episode, **options: Any) -> Kind:
    return Kind(make=partial(make, **options), first_seed=first_seed, events=events)


KINDS = {
    "kills": _kind(
        5, "worker poisoned", "reset: worker lost", "end after a worker change", "pool taken over",
        max_workers=3, lethal_share=0.1, hang_share=0.3, shares_pools=True,
    ),
    "faults": _kind(
        1, "reset: step failed", "reset: out of memory", "memory: smaller step",
        failing_share=0.05, corrupt_share=0.1, small_memory_share=1.0,
    ),
    "preemption": _kind(2, "end after a preemption", "page saved", "page loaded", crowded=True),
    "constraints": _kind(
        1, "constraint answered", "constraint dropped", "end: constraint complete",
        constrained_share=0.6, without_constraints_share=0.0,
    ),
    "standby": _kind(7, "standby seated", "not serving: worker lost", max_workers=1, lethal_share=0.1, hang_share=0.3),
    "tenants": _kind(7, "token file", tenants=("t1", "t2", "t3", "t3")),
    "weights": _kind(0, "weights loaded", "update: done", "output of several versions", updates=True),
    "unset": _kind(2, "worker outgrown", "end: context full", unset=0.7, max_workers=3),
    "journal": _kind(
        24, "core died", "core died before it sent", "resumed after the core's death", "restored suspects",
        make=_deaths,
    ),
    "chats": _kind(0, "turn", "turn found in the cache", make=_chats),
}  # fmt: skip
