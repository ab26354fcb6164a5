"""Whether a request that arrives now can be computed: one value, for each state of the workers."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.lanes import DEATHS
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Running, Weights, WeightsRestored
from scheduler_svc.core.messages.reports import WaitReason, WorkerState
from scheduler_svc.core.operations.weights import RETRY_SECONDS
from tests.scheduler_svc.core.sent_plans import load
from tests.scheduler_svc.core.updated import UpdatedFleet
from tests.scheduler_svc.core.world import FRONTEND

WORDS = "'/weights/v1' cannot be opened: No such file or directory"


def serving() -> UpdatedFleet:
    fleet = UpdatedFleet(silence_timeout_seconds=1e6)
    fleet.run()
    return fleet


def joins(fleet: UpdatedFleet, *, refusal: str = "", is_standby: bool = False) -> UpdatedFleet:
    name = fleet.start(is_standby=is_standby)
    fleet.workers[name].refusal = refusal
    return fleet


def lost() -> UpdatedFleet:
    fleet = serving()
    fleet.lose("a")
    return fleet


def updated() -> UpdatedFleet:
    fleet = serving()
    fleet.update("v1")
    fleet.run()
    return fleet


def refused() -> UpdatedFleet:
    """The worker is killed after an update, and its successor cannot load the weights."""
    fleet = updated()
    fleet.lose("a")
    joins(fleet, refusal=WORDS).run()
    return fleet


def loading() -> UpdatedFleet:
    fleet = serving()
    fleet.update("v1")
    fleet.run_until_loading()
    return fleet


def finishing() -> UpdatedFleet:
    """Requests end with the old weights first, and none starts meanwhile."""
    fleet = serving()
    fleet.ask([1, 2, 3], max_new_tokens=200)
    fleet.step()
    fleet.update("v1", Running.FINISH)
    return fleet


def drained() -> UpdatedFleet:
    fleet = serving()
    fleet.handle(ev.Drain(frontend=FRONTEND, query=9, worker="a", max_seconds=0.0, force=True))
    return fleet


def left() -> UpdatedFleet:
    fleet = drained()
    fleet.run()
    fleet.handle(ev.WorkerLost(worker="a", reason="it stops", is_orderly=True))
    return fleet


def stopping() -> UpdatedFleet:
    fleet = serving()
    fleet.handle(ev.DrainStarted())
    return fleet


def crashing() -> UpdatedFleet:
    fleet = UpdatedFleet(num_workers=0)
    for _ in range(DEATHS):
        fleet.lose(fleet.start())
    return fleet


SITUATIONS: dict[str, tuple[Callable[[], UpdatedFleet], WaitReason | None, str]] = {
    "nobody yet": (lambda: UpdatedFleet(num_workers=0), WaitReason.NO_WORKER, "no worker has joined yet"),
    "its first step": (UpdatedFleet, WaitReason.WORKER_STARTING, "a has joined and computes its first step"),
    "serving": (serving, None, ""),
    "updated": (updated, None, ""),
    "lost": (lost, WaitReason.WORKER_LOST, "no worker is connected; the last one, a, was lost: killed"),
    "another one joins": (lambda: joins(lost()), WaitReason.WORKER_STARTING, "b has joined"),
    "only on standby": (
        lambda: joins(UpdatedFleet(num_workers=0), is_standby=True), WaitReason.WORKER_STARTING, "a has joined"
    ),
    "weights refused": (refused, WaitReason.WEIGHTS_REFUSED, f"worker b cannot load weights 'v1': {WORDS}"),
    "loading": (loading, WaitReason.LOADING_WEIGHTS, "worker a loads weights 'v1'"),
    "finishing": (finishing, WaitReason.LOADING_WEIGHTS, "worker a has other weights than the service's"),
    "a worker is drained": (drained, WaitReason.WORKERS_LEAVING, "worker a is drained"),
    "the last one was drained": (left, WaitReason.NO_WORKER, "the last one, a, was drained"),
    "the service is drained": (stopping, WaitReason.SHUTTING_DOWN, "the service is shutting down"),
    "crashing": (crashing, WaitReason.CRASH_LOOP, "workers crash in a loop"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "reason", "message"), SITUATIONS.values(), ids=SITUATIONS)
def test_each_state_of_the_workers_has_one_reason(
    make: Callable[[], UpdatedFleet], reason: WaitReason | None, message: str
) -> None:
    fleet = make()
    fleet.handle(ev.Tick())
    value = fleet.core.availability.value
    assert (None if value is None else value.reason) is reason
    assert value is None or message in value.message
    # A front end that joins gets the same message.
    effects = fleet.core.handle(ev.FrontendJoined(frontend="f-2"), fleet.now)
    [status] = [effect for effect in effects if isinstance(effect, fx.CoreStatus) and effect.frontend == "f-2"]
    assert status.reason is reason and status.not_serving == ("" if value is None else value.message)
    assert status.refuses == (reason in (WaitReason.SHUTTING_DOWN, WaitReason.CRASH_LOOP))
    takes_requests = reason in (None, WaitReason.SHUTTING_DOWN)
    assert status.workers == load(fleet).workers == (1 if takes_requests else 0)


def test_a_worker_that_cannot_load_is_not_counted_and_serves_when_it_can() -> None:
    fleet = refused()
    [worker] = load(fleet).per_worker
    assert (worker.state, worker.detail) == (WorkerState.REFUSED, f"cannot load weights 'v1': {WORDS}")
    first = fleet.core.availability.value
    # It tries again and again, which changes neither the reason nor the time.
    for _ in range(3):
        fleet.tick(RETRY_SECONDS)
        fleet.run()
        assert fleet.core.availability.value is first
    fleet.workers["b"].refusal = ""
    fleet.tick(RETRY_SECONDS)
    fleet.run()
    fleet.tick()
    assert fleet.core.availability.value is None
    [worker] = load(fleet).per_worker
    assert (worker.state, worker.detail, worker.weights_version) == (WorkerState.SERVING, "", "v1")


def test_a_refusal_before_the_first_worker_serves_has_its_words() -> None:
    """A scheduler that continues a journal after an update; its worker finds no folder."""
    fleet = UpdatedFleet(num_workers=0, silence_timeout_seconds=1e6)
    fleet.handle(WeightsRestored(weights=Weights(version="v1", folder="/weights/v1")))
    joins(fleet, refusal=WORDS).run()
    fleet.tick()
    value = fleet.core.availability.value
    assert value is not None and value.reason is WaitReason.WEIGHTS_REFUSED
    with pytest.raises(AssertionError, match="cannot load weights 'v1'"):
        # The rig raises the refusal's message.
        fleet.ask([1, 2, 3])


def test_another_update_lets_a_worker_serve_that_could_not_load_the_last_one() -> None:
    fleet = refused()
    fleet.workers["b"].refusal = ""
    fleet.update("v2")
    fleet.run()
    assert fleet.core.availability.value is None
    assert [worker.weights_version for worker in load(fleet).per_worker] == ["v2"]


def test_the_time_is_that_since_which_nothing_is_computed_whatever_the_reasons_were() -> None:
    fleet = lost()
    fleet.tick(0.0)
    value = fleet.core.availability.value
    assert value is not None and value.since == fleet.now
    since = fleet.now
    fleet.tick(3.0)
    joins(fleet)
    fleet.tick(2.0)
    value = fleet.core.availability.value
    assert value is not None and (value.reason, value.since) == (WaitReason.WORKER_STARTING, since)
    effects = fleet.core.handle(ev.FrontendJoined(frontend="f-2"), fleet.now)
    [status] = [effect for effect in effects if isinstance(effect, fx.CoreStatus) and effect.frontend == "f-2"]
    assert status.not_serving_seconds == 5.0


def test_a_standby_worker_counts_only_if_it_could_take_over() -> None:
    fleet = updated()
    assert (load(fleet).standby_workers, load(fleet).workers) == (0, 1)
    joins(fleet, is_standby=True, refusal=WORDS).run()
    assert (load(fleet).standby_workers, load(fleet).workers) == (0, 1)
    assert load(fleet).per_worker[-1].state is WorkerState.REFUSED
    fleet.workers["b"].refusal = ""
    fleet.tick(RETRY_SECONDS)
    fleet.run()
    assert load(fleet).standby_workers == 1
    # Its seat is taken in the event of the loss, so front ends hear of no gap.
    fleet.lose("a")
    fleet.tick()
    assert fleet.core.availability.value is None


def test_front_ends_are_told_of_each_change_once() -> None:
    fleet = serving()
    fleet.tick()
    fleet.effects.clear()
    fleet.lose("a")
    for _ in range(5):
        fleet.tick(1.0)
    joins(fleet).run()
    reasons = [status.reason for status in fleet.told(fx.CoreStatus)]
    assert reasons == [WaitReason.WORKER_LOST, WaitReason.WORKER_STARTING, None]
