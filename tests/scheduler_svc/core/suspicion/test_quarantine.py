"""A quarantined request is refused without another death, until its entry expires; other requests are not touched."""

from dataclasses import replace

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.suspicion.quarantine import MAX_ENTRIES, Entry, Quarantine
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.suspicion.deadly import KILLER, DeadlyFleet
from tests.scheduler_svc.core.world import greedy

SHAPE = Shape(page_size=4, num_pages=100, max_rows=8, max_length=60, token_budget=64, vocab_size=300)
POISON, HARMLESS = [1, 2, KILLER], [1, 2, 3]


def test_a_convicted_request_is_refused_without_another_death_until_its_entry_expires() -> None:
    fleet = DeadlyFleet(SHAPE, config=greedy(quarantine_seconds=100.0))
    first = fleet.submit(POISON, max_new_tokens=5)
    fleet.run_until_ended()
    failure = fleet.end(first).failure
    assert failure is not None and failure.code is fx.FailureCode.INTERNAL
    num_deaths = len(fleet.deaths)
    fleet.step(2.0)
    refused, other = fleet.submit(POISON, max_new_tokens=5), fleet.submit(HARMLESS, max_new_tokens=5)
    fleet.run_until_ended()
    refusal = fleet.streams[refused].rejected
    assert refusal is not None and refusal.code is fx.RejectCode.QUARANTINED
    assert fleet.end(other).failure is None
    assert len(fleet.deaths) == num_deaths
    fleet.now += 100.0
    again = fleet.submit(POISON, max_new_tokens=5)
    assert fleet.streams[again].rejected is None


@pytest.mark.parametrize("count", [1, MAX_ENTRIES, MAX_ENTRIES + 3])
def test_the_oldest_entries_are_dropped_beyond_the_bound(count: int) -> None:
    quarantine = Quarantine(1000.0)
    entry = Entry(key="", request_id="r", tenant="t", at=0.0, cause="c")
    for number in range(count):
        quarantine.restore(replace(entry, key=str(number), at=float(number) / count))
    assert len(quarantine) == min(count, MAX_ENTRIES)
    assert quarantine.entries(1.0)[0].key == str(max(0, count - MAX_ENTRIES))
