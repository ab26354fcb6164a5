"""The quarantine: which requests it refuses, for how long, and with which words."""

from dataclasses import replace

import numpy as np
import pytest
from tandem.internal.v1.frontend_pb2 import Submit

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import ClearQuarantine, QuarantineEntry, QuarantineQuery, QuarantineReply
from scheduler_svc.core.suspicion.quarantine import MAX_ENTRIES, Quarantine, key_of
from scheduler_svc.wire import frontend as wire
from tests.rigs.executor import Shape
from tests.rigs.sampling import Settings
from tests.scheduler_svc.core.suspicion.deadly import KILLER, DeadlyFleet
from tests.scheduler_svc.core.world import FRONTEND, greedy

SHAPE = Shape(page_size=4, num_pages=200, max_rows=8, max_length=60, vocab_size=300)


def convicted(**settings: float) -> DeadlyFleet:
    """Returns a fleet in which the request [1, 2, KILLER] was convicted."""
    fleet = DeadlyFleet(SHAPE, config=greedy(**settings))
    fleet.submit([1, 2, KILLER], max_new_tokens=5, ignore_eos=True, request_id="bad", temperature=1.0, seed=1)
    fleet.submit([1, 2, 3], max_new_tokens=30, ignore_eos=True)
    fleet.run_until_ended()
    while not fleet.core.lanes:
        fleet.step()
    return fleet


def entries(fleet: DeadlyFleet) -> tuple[QuarantineEntry, ...]:
    [reply] = fleet.handle(QuarantineQuery(frontend=FRONTEND, query=7))
    assert isinstance(reply, QuarantineReply) and reply.query == 7
    return reply.entries


def test_a_convicted_request_is_refused_without_a_death() -> None:
    fleet = convicted()
    deaths = len(fleet.deaths)
    again = fleet.submit([1, 2, KILLER], max_new_tokens=5, ignore_eos=True, temperature=1.0, seed=1, num_samples=2)
    rejected = fleet.refusal(again)
    assert rejected.code is fx.RejectCode.QUARANTINED
    assert "quarantined for another 3" in rejected.message and "'bad'" in rejected.message
    assert "while it ran alone at token 3" in rejected.message
    fleet.run_until_ended()
    assert len(fleet.deaths) == deaths
    [entry] = entries(fleet)
    assert (entry.request_id, len(entry.key), len(entry.tenant)) == ("bad", 64, 16)
    assert 0 <= entry.age_seconds < 10 and entry.expires_seconds == pytest.approx(3600 - entry.age_seconds)


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "another tenant"},
        {"max_new_tokens": 6},
        {"stop_token_ids": (9,)},
        {"min_new_tokens": 1},
        {"ignore_eos": False},
        {"num_logprobs": 1},
        {"temperature": 0.5},
    ],
)
def test_another_tenant_or_option_is_another_request(other: dict[str, object]) -> None:
    fleet = convicted()
    same: dict[str, object] = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    number = fleet.submit([1, 2, KILLER], **(same | other))  # type: ignore[arg-type]
    assert fleet.streams[number].rejected is None


def test_an_entry_expires() -> None:
    fleet = convicted(quarantine_seconds=50.0)
    assert len(entries(fleet)) == 1
    fleet.now += 60
    assert entries(fleet) == ()
    number = fleet.submit([1, 2, KILLER], max_new_tokens=5, ignore_eos=True, temperature=1.0, seed=1)
    assert fleet.streams[number].rejected is None


@pytest.mark.parametrize("by_key", [False, True])
def test_operators_clear_entries(by_key: bool) -> None:
    fleet = convicted()
    [entry] = entries(fleet)
    keys = (entry.key, "0" * 64) if by_key else ()
    [reply] = fleet.handle(ClearQuarantine(frontend=FRONTEND, query=8, keys=keys))
    assert reply == QuarantineReply(frontend=FRONTEND, query=8, entries=(), removed=1)
    number = fleet.submit([1, 2, KILLER], max_new_tokens=5, ignore_eos=True, temperature=1.0, seed=1)
    assert fleet.streams[number].rejected is None


def test_the_oldest_entry_gives_way_to_a_new_one() -> None:
    quarantine = Quarantine(3600.0)
    for i in range(MAX_ENTRIES + 3):
        entry = QuarantineEntry(
            key=f"{i:064}", request_id=f"r{i}", tenant="", age_seconds=0.0, expires_seconds=0.0, cause=""
        )
        quarantine.restore(entry, float(i))
    kept = quarantine.report(float(MAX_ENTRIES))
    assert [entry.request_id for entry in kept] == [f"r{i}" for i in range(3, MAX_ENTRIES + 3)]


def test_the_seed_does_not_count() -> None:
    """A caller that leaves the seed out gets another one each time, and the request is the same."""
    submit = convicted().streams[1].submit
    seeds = [replace(submit, sampling=Settings(temperature=1.0, seed=seed).encoded()) for seed in (1, 2)]
    keyed = [replace(one, sampling_key=wire._sampling_key(Submit(sampling=one.sampling))) for one in seeds]
    assert key_of(keyed[0]) == key_of(keyed[1])
    assert key_of(seeds[0]) != key_of(seeds[1]), "without a key of the front end's wire, all bytes count"
    warm = replace(
        submit, sampling_key=wire._sampling_key(Submit(sampling=Settings(temperature=0.5, seed=1).encoded()))
    )
    assert key_of(warm) != key_of(keyed[0])


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    submit = convicted().streams[1].submit
    other = replace(submit, prefix_root=b"", prompt=np.array([1, 2, KILLER], np.int32))
    assert key_of(replace(other, prefix_root=other.prompt.tobytes()[:4], prompt=other.prompt[1:])) != key_of(other)
    assert isinstance(submit, ev.Submit)
