"""New weights under traffic: every token is that of the version that its stream's end names; lanes, modes, faults."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.operators import Running, Weights, WeightsRestored
from scheduler_svc.core.messages.reports import UpdateState
from scheduler_svc.core.operations.weights import LOAD_SECONDS, RETRY_SECONDS
from scheduler_svc.core.recovery.held_pools import fits
from tests.scheduler_svc.core.stream import Stream
from tests.scheduler_svc.core.updated import ROOT, UpdatedFleet
from tests.scheduler_svc.core.world import info_of

EXACT = (Running.FINISH, Running.RECOMPUTE, Running.ABORT)


def proven(**options: Any) -> UpdatedFleet:
    """A fleet; each of its workers has computed a step."""
    fleet = UpdatedFleet(**options)
    fleet.run()
    return fleet


@pytest.fixture
def fleet() -> UpdatedFleet:
    return proven()


def busy(tokens: int = 20, steps: int = 8, **options: Any) -> tuple[UpdatedFleet, Stream]:
    """A fleet after some steps of one request."""
    fleet = proven(**options)
    stream = fleet.ask([1, 2, 3], max_new_tokens=tokens)
    fleet.steps(steps)
    return fleet, stream


def last_state(fleet: UpdatedFleet) -> UpdateState:
    return fleet.reports[-1].state


def is_over(fleet: UpdatedFleet, version: str) -> bool:
    reports = fleet.reports
    return bool(reports) and reports[-1].version == version and reports[-1].state is not UpdateState.UPDATING


@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.long)])
def test_each_of_1000_streams_has_the_tokens_of_its_versions_across_50_updates(num_workers: int) -> None:
    """Prompts share beginnings, so a page of an old version that is found again changes tokens and is noticed."""
    fleet = UpdatedFleet(num_workers=num_workers, seed=num_workers, max_waiting=2000)
    rng, num_updates, fleet.audit_every = fleet.rng, 0, 8
    stems = [[rng.randrange(4) for _ in range(12)] for _ in range(3)]
    fleet.run()
    num_streams = 1000 // (1 if num_workers == 1 else 2)
    while len(fleet.streams) < num_streams:
        for _ in range(4):
            fleet.ask([*rng.choice(stems)[: rng.randint(2, 12)], rng.randrange(4)], max_new_tokens=rng.randint(1, 12))
        fleet.steps(rng.randint(1, 6))
        if len(fleet.streams) * 50 // num_streams > num_updates:
            num_updates += 1
            fleet.update(f"v{num_updates}", rng.choice(EXACT), in_turn=rng.random() < 0.5)
            if rng.random() < 0.2:
                # A worker is killed, perhaps while it loads, and its successor begins with the first weights.
                fleet.steps(rng.randint(0, 3))
                fleet.lose(rng.choice(list(fleet.workers)))
                fleet.start()
            while not is_over(fleet, f"v{num_updates}"):
                fleet.step()
            assert last_state(fleet) is UpdateState.DONE
    fleet.run()
    assert num_updates >= 50
    assert set(fleet.versions().values()) == {f"v{num_updates}"}
    crossed = 0
    for stream in fleet.streams.values():
        fleet.check(stream)
        crossed += len(set(stream.versions())) > 1
    assert crossed > 20
    assert any(stream.end and stream.end.stats.cached_prompt_tokens for stream in fleet.streams.values())


def test_requests_are_recomputed_by_default_and_their_spans_tell_where(fleet: UpdatedFleet) -> None:
    stream = fleet.ask([1, 2, 3], max_new_tokens=20)
    while len(stream.tokens) < 5:
        fleet.step()
    fleet.update("v1")
    fleet.run()
    assert stream.ended.reason is fx.EndReason.LENGTH
    old, new = stream.end.stats.weights
    assert (old, new.version) == (WeightsSpan(from_token=0, version=""), "v1") and 5 <= new.from_token <= 8
    assert stream.end.stats.recomputed_tokens > 0
    fleet.check(stream)
    assert last_state(fleet) is UpdateState.DONE and [each.weights for each in fleet.told(fx.WeightsChanged)] == [
        Weights(version="v1", folder=f"{ROOT}/v1")
    ]


def test_requests_finish_with_the_old_weights() -> None:
    fleet, first = busy(steps=6)
    fleet.update("v1", Running.FINISH)
    fleet.step()
    second = fleet.ask([1, 2, 3], max_new_tokens=4)
    fleet.run()
    assert set(first.versions()) == {""} and set(second.versions()) == {"v1"}
    fleet.check(first, second)


def test_requests_continue_with_their_old_pages_which_nobody_else_gets(fleet: UpdatedFleet) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    stream = fleet.ask(prompt, max_new_tokens=20)
    while len(stream.tokens) < 5:
        fleet.step()
    generation = fleet.core.lanes["a"].generation
    fleet.update("v1", Running.CONTINUE)
    fleet.step()
    later = fleet.ask([*prompt, *stream.tokens[:5]], max_new_tokens=4)
    fleet.run()
    assert fleet.core.lanes["a"].generation == generation
    assert stream.ended.stats.recomputed_tokens == 0
    assert [span.version for span in stream.end.stats.weights] == ["", "v1"]
    assert later.ended.stats.cached_prompt_tokens == 0
    fleet.check(later)


def test_a_sample_that_starts_after_an_update_shares_no_page_with_its_older_sibling(fleet: UpdatedFleet) -> None:
    blockers = [fleet.ask([n, n, n], max_new_tokens=10) for n in range(1, 8)]
    fleet.step()
    fleet.ask([1, 2, 3, 1, 2, 3, 1, 2, 3, 2], max_new_tokens=30, num_samples=2)
    fleet.steps(6)
    fleet.update("v1", Running.CONTINUE)
    fleet.run()
    assert all(blocker.end for blocker in blockers)


def test_requests_are_aborted() -> None:
    fleet, stream = busy()
    fleet.update("v1", Running.ABORT)
    fleet.run()
    assert stream.ended.reason is fx.EndReason.ABORTED
    assert set(stream.versions()) == {""}
    fleet.check(stream)


@pytest.mark.parametrize("running", list(Running))
def test_a_refused_folder_changes_nothing(running: Running) -> None:
    fleet = proven(num_workers=2)
    streams = [fleet.ask([1, 2, n], max_new_tokens=20) for n in range(4)]
    fleet.steps(8)
    for worker in fleet.workers.values():
        worker.refusal = "model.norm.weight is [3], the served model's is [4]"
    fleet.update("v1", running)
    fleet.run()
    assert last_state(fleet) is UpdateState.REFUSED and "model.norm.weight" in fleet.reports[-1].detail
    assert len(fleet.told(fx.LoadWeights)) == 1
    for stream in streams:
        assert stream.ended.reason is fx.EndReason.LENGTH
        assert stream.end.stats.recomputed_tokens == 0
        fleet.check(stream)
    assert fleet.told(fx.WeightsChanged) == []
    # The same version may be tried again.
    for worker in fleet.workers.values():
        worker.refusal = ""
    fleet.update("v1", running)
    fleet.run()
    assert last_state(fleet) is UpdateState.DONE


def test_an_update_is_refused_with_the_reason(fleet: UpdatedFleet) -> None:
    fleet.update("v1")
    fleet.update("v2")
    assert [(each.code, each.query) for each in fleet.told(fx.UpdateRefused)] == [(fx.RejectCode.DUPLICATE, 2)]
    assert "the update to version 'v1' goes on" in fleet.told(fx.UpdateRefused)[0].message
    fleet.run()
    fleet.update("v1")
    refused = fleet.told(fx.UpdateRefused)[-1]
    assert refused.field == "version" and "was used before" in refused.message
    for folder in ("/etc", "weights", f"{ROOT}/../etc", f"{ROOT}s/v", "/"):
        [refused] = fleet.handle(
            ev.UpdateWeights(frontend="f-1", query=9, weights=Weights(version="v9", folder=folder))
        )
        assert isinstance(refused, fx.UpdateRefused) and refused.field == "folder" and folder in refused.message
    off = UpdatedFleet()
    off.core = type(off.core)(type(off.core.config)())
    off.update("v1")
    assert "--weights-folders" in off.told(fx.UpdateRefused)[-1].message


def test_a_worker_killed_while_it_loads_comes_back_with_the_new_weights() -> None:
    fleet, stream = busy()
    fleet.update("v1")
    fleet.run_until_loading()
    fleet.lose("a")
    fleet.start()
    fleet.run()
    assert fleet.versions() == {"b": "v1"} and last_state(fleet) is UpdateState.DONE
    fleet.check(stream)


def test_weights_that_kill_two_workers_are_given_up() -> None:
    fleet = proven(num_workers=3)
    fleet.update("v1")
    for _ in range(2):
        fleet.lose(fleet.run_until_loading())
    fleet.run()
    assert last_state(fleet) is UpdateState.REFUSED and "2 workers were lost" in fleet.reports[-1].detail
    assert len(fleet.versions()) == 1 and set(fleet.versions().values()) == {""}


def test_a_worker_that_joins_later_loads_before_its_first_plan_and_tries_again_if_it_cannot() -> None:
    fleet = proven()
    fleet.update("v1")
    fleet.run()
    fleet.lose("a")
    name = fleet.start()
    fleet.workers[name].refusal = "the folder is gone"
    stream = fleet.ask([1, 2, 3], max_new_tokens=4)
    fleet.run()
    assert [each.worker for each in fleet.told(fx.LoadWeights)].count(name) == 1 and not stream.tokens
    assert sum("the folder is gone" in note for note in fleet.notes) == 1
    fleet.workers[name].refusal = ""
    wake = fleet.core.next_wake()
    assert wake is not None and wake <= fleet.now + RETRY_SECONDS
    for _ in range(int(RETRY_SECONDS) + 1):
        fleet.handle(ev.WorkerAlive(worker=name))
        fleet.tick(1.0)
    fleet.run()
    assert set(stream.versions()) == {"v1"}
    fleet.check(stream)


def test_standby_workers_load_too_and_the_one_with_the_new_weights_is_seated(fleet: UpdatedFleet) -> None:
    behind, updated = fleet.start(is_standby=True), fleet.start(is_standby=True)
    fleet.run()
    fleet.workers[behind].refusal = "no space"
    fleet.workers["a"].executor.violations.clear()
    # A lane without requests loads first, and the oldest of these: a.
    fleet.update("v1")
    fleet.run()
    assert last_state(fleet) is UpdateState.INCOMPLETE and "no space" in fleet.reports[-1].detail
    assert fleet.versions() == {"a": "v1", behind: "", updated: "v1"}
    fleet.lose("a")
    fleet.tick()
    assert [lane.worker for lane in fleet.core.lanes.values() if lane.phases.counts] == [updated]


def test_workers_load_in_turn_and_one_always_serves() -> None:
    fleet = proven(num_workers=3)
    streams = [fleet.ask([1, 2, n % 4], max_new_tokens=30) for n in range(12)]
    fleet.steps(8)
    fleet.update("v1", in_turn=True)
    most = 0
    while not fleet.reports or last_state(fleet) is UpdateState.UPDATING:
        fleet.step()
        most = max(most, sum(not lane.phases.may_plan for lane in fleet.core.lanes.values()))
    fleet.run()
    assert most == 1
    fleet.check(*streams)


def test_time_that_is_over_leaves_the_lanes_as_they_were() -> None:
    fleet, stream = busy(tokens=30)
    fleet.update("v1", Running.FINISH, max_seconds=0.005)
    fleet.run()
    assert last_state(fleet) is UpdateState.TIME_LIMIT and fleet.versions() == {"a": ""}
    assert stream.ended.reason is fx.EndReason.LENGTH
    later = fleet.ask([1, 2, 3], max_new_tokens=3)
    fleet.run()
    assert set(later.versions()) == {""}


def test_a_worker_that_does_not_answer_is_given_up(fleet: UpdatedFleet) -> None:
    fleet.update("v1")
    fleet.tick()
    fleet.tick(LOAD_SECONDS - 1)
    assert "a" in fleet.core.lanes
    fleet.tick(2)
    assert "a" not in fleet.core.lanes
    assert any("has not loaded weights 'v1' in time" in note for note in fleet.notes)


@pytest.mark.parametrize("refusal", ["", "no space"])
@pytest.mark.parametrize("running", list(Running))
@pytest.mark.parametrize("is_told", [False, True], ids=["before it was told", "while it loads"])
def test_the_rows_of_a_worker_that_is_drained_when_it_is_to_load_go_on(
    running: Running, refusal: str, is_told: bool
) -> None:
    """It is the only worker, so its rows end there."""
    fleet, stream = busy(tokens=30, steps=6)
    fleet.workers["a"].refusal = refusal
    fleet.update("v1", running)
    fleet.tick()
    if is_told:
        fleet.run_until_loading()
    fleet.handle(ev.Drain(frontend="f-1", query=9, worker="a", max_seconds=0.0, force=True))
    fleet.run()
    if running is Running.RECOMPUTE and is_told and not refusal:
        # The request has gone back to the queue.
        fleet.lose("a")
        fleet.start()
        fleet.run()
    assert stream.end is not None
    if running in EXACT:
        fleet.check(stream)


@pytest.mark.parametrize(
    ("running", "refusal"),
    [(Running.CONTINUE, ""), *((running, "no space") for running in Running if running is not Running.FINISH)],
)
def test_requests_start_on_a_worker_that_was_asked_to_stop_while_it_loaded_and_stays(
    running: Running, refusal: str
) -> None:
    fleet, first = busy(tokens=30, steps=6)
    fleet.workers["a"].refusal = refusal
    fleet.update("v1", running)
    fleet.run_until_loading()
    fleet.handle(ev.WorkerStops(worker="a"))
    second = fleet.ask([1, 2, 3])
    fleet.steps(3)
    assert first.end is None and not second.tokens
    fleet.handle(ev.DrainStarted())
    fleet.run()
    assert first.end is not None and second.end is not None
    fleet.check(second)


@pytest.mark.parametrize("is_drained", [False, True])
def test_no_tick_is_due_at_once_while_a_worker_that_refused_weights_has_requests(is_drained: bool) -> None:
    """Its requests end before it is asked again, so the time to ask it may be long past."""
    fleet = proven(num_workers=2)
    streams = [fleet.ask([1, 2, n % 4], max_new_tokens=100) for n in range(10)]
    fleet.steps(6)
    fleet.workers["b"].refusal = "no space"
    fleet.update("v1")
    while not is_over(fleet, "v1"):
        fleet.step()
    assert last_state(fleet) is UpdateState.INCOMPLETE and fleet.core.lanes["b"].rows.num_seated
    if is_drained:
        fleet.handle(ev.Drain(frontend="f-1", query=9, worker="b", max_seconds=0.0))
    fleet.now += RETRY_SECONDS
    for name in ("a", "b"):
        fleet.handle(ev.WorkerAlive(worker=name))
    for _ in range(3):
        fleet.tick()
        wake = fleet.core.next_wake()
        assert fleet.core.lanes["b"].rows.num_seated and (wake is None or wake > fleet.now)
        for name in ("a", "b"):
            fleet.turn(name)
    fleet.run()
    assert all(stream.end for stream in streams)


def test_a_new_core_takes_the_weights_of_its_workers_or_of_its_journal(fleet: UpdatedFleet) -> None:
    fleet.update("v1")
    fleet.run()
    executor = fleet.lose("a").executor
    for from_journal in (False, True):
        successor = UpdatedFleet(num_workers=0)
        if from_journal:
            successor.handle(WeightsRestored(weights=Weights(version="v1", folder=f"{ROOT}/v1")))
        else:
            successor.start(executor=executor)
        successor.start()
        stream = successor.ask([1, 2, 3]) if not from_journal and successor.core.info else None
        successor.run()
        assert set(successor.versions().values()) == {"v1"}
        assert stream is None or set(stream.versions()) == {"v1"}


def test_the_pool_of_a_worker_with_old_weights_is_not_taken_over() -> None:

    info = replace(info_of(UpdatedFleet(num_workers=0).shape), pool_id=b"p", pool_layout=b"l")
    assert fits(info, info)
    assert not fits(info, replace(info, weights_version="v1"))


def test_a_trial_stays_on_a_lane_that_waits_for_new_weights() -> None:
    """Suspects run on one lane at a time, which the audit after each event checks."""
    fleet = proven(num_workers=1)
    streams = [fleet.ask([1, 2, n], max_new_tokens=12) for n in range(6)]
    fleet.steps(6)
    fleet.tick()
    fleet.lose("a")
    # Workers of one row, so that a member waits until the other has ended.
    fleet.shape = replace(fleet.shape, max_rows=1)
    fleet.start()
    fleet.start()
    suspects = fleet.core.suspects
    assert suspects.handles
    for _ in range(20):
        fleet.tick()
        if any(request.row for request in suspects.members()):
            break
        for name in ("b", "c"):
            fleet.turn(name)
    assert suspects.trial is not None and len(suspects.members()) > 1
    # The other worker loads while the trial's has not finished its step.
    [other] = {"b", "c"} - {suspects.trial.worker}
    fleet.update("v1", Running.FINISH)
    while fleet.versions()[other] != "v1":
        fleet.tick()
        fleet.turn(other)
    fleet.tick()
    assert any(request.row for request in suspects.members())
    fleet.run()
    assert all(stream.end and stream.end.reason is fx.EndReason.LENGTH for stream in streams)
    fleet.check(*streams)
    assert set(fleet.versions().values()) == {"v1"}


def test_nobody_joins_a_trial_on_a_lane_that_waits_for_new_weights() -> None:
    """Seed 978 of the long simulation: other requests were placed there, which ended the service."""
    fleet = proven(num_workers=1)
    suspect = fleet.ask(list(range(3, 43)), max_new_tokens=12)
    fleet.steps(6)
    fleet.tick()
    fleet.lose("a")
    # Its trial takes several steps.
    fleet.shape = replace(fleet.shape, token_budget=16)
    for _ in range(3):
        fleet.start()
    while not any(request.row for request in fleet.core.suspects.members()):
        fleet.tick()
        for name in ("b", "c", "d"):
            fleet.turn(name)
    trial_on = fleet.core.suspects.trial.worker
    fleet.update("v1", Running.FINISH)
    others = {"b", "c", "d"} - {trial_on}
    while any(fleet.versions()[name] != "v1" for name in others):
        fleet.tick()
        for name in others:
            fleet.turn(name)
    lane = fleet.core.lanes[trial_on]
    assert lane.rows.num_seated == 1 and not lane.phases.may_start
    # More than the others have rows for.
    streams = [suspect, *(fleet.ask([4, 5, n], max_new_tokens=4) for n in range(3 * lane.info.max_rows))]
    while lane.rows.num_seated:
        fleet.tick()
        assert lane.rows.num_seated == 1
        fleet.turn(trial_on)
    fleet.run()
    fleet.check(*streams)


def test_a_trial_that_fits_only_a_worker_with_old_weights_lets_others_be_tried() -> None:
    fleet = proven(num_workers=1)
    large = fleet.shape
    busy = [fleet.ask([1, 1, n], max_new_tokens=120) for n in range(4)]
    fleet.step()
    fleet.start()
    fleet.steps(2)
    long, short = (fleet.ask([1, 2, n], max_new_tokens=count) for n, count in ((3, 100), (4, 8)))
    fleet.steps(3)
    fleet.tick()
    fleet.lose("b")
    # The first trial is that of the long request, which fits a alone. A plan is in flight there, so it waits.
    fleet.tick()
    suspects = fleet.core.suspects
    assert len(suspects.handles) == 2 and suspects.trial is not None and suspects.trial.worker == "a"
    assert not any(request.row for request in suspects.members())
    fleet.workers["a"].refusal = "no space"
    fleet.shape = replace(large, max_length=32)
    fleet.start()
    fleet.update("v1", Running.RECOMPUTE)
    while fleet.versions()["c"] != "v1":
        fleet.tick()
        fleet.turn("c")
    fleet.steps(60)
    assert short.end is not None and long.end is None
    fleet.workers["a"].refusal = ""
    fleet.now += RETRY_SECONDS
    fleet.run()
    fleet.check(*busy, long, short)
