"""A worker on standby takes over when the serving one dies; its content-checking executor sees every plan."""

import random

from tests.rigs.processes import Rig
from tests.rigs.streams import Caller
from tests.system.asks import answer, random_asks, send

SHAPE = ("--page-size", "16", "--num-pages", "2048", "--max-rows", "16", "--max-length", "1024")
SLOW = ("--step-ms", "2")


def roles(caller: Caller) -> tuple[list[int], list[int]]:
    """The process ids of the serving workers and of those on standby."""
    each = caller.load().per_worker
    return [one.pid for one in each if not one.is_standby], [one.pid for one in each if one.is_standby]


def test_kills_with_a_standby_worker_change_no_stream(rig: Rig) -> None:
    rng = random.Random(4)
    record = rig.runtime_dir / "record.bin"
    scheduler, serving, caller = rig.serve(*SHAPE, *SLOW, scheduler_flags=("--record", str(record)))
    streams = send(caller, random_asks(16, seed=3, prompts=(1, 60), outputs=(150, 200)))
    for _ in range(3):
        with rig.slowed():
            standby = rig.worker(*SHAPE, *SLOW, "--standby")
            caller.wait_load(lambda load: load.standby_workers == 1)
        streams.wait_more(rng.randint(1, 300))
        with rig.slowed():
            assert roles(caller) == ([serving.pid], [standby.pid])
            before = caller.load()
            assert (before.workers, before.pages_total) == (1, 2047)
            serving.kill()
            after = caller.wait_load(lambda load: load.worker_lost_reason != "" and not load.standby_workers)
            assert (after.workers, after.lane_resets) == (1, before.lane_resets + 1)
            standby.wait_line("^seated")
        serving = standby
    streams.check()
    assert scheduler.terminate() == 0
    rig.check_record(record)


def test_a_worker_that_stops_in_order_is_replaced(rig: Rig) -> None:
    _, serving, caller = rig.serve(*SHAPE, *SLOW)
    standby = rig.worker(*SHAPE, *SLOW, "--standby")
    caller.wait_load(lambda load: load.standby_workers == 1)
    streams = send(caller, random_asks(8, seed=5, prompts=(1, 40), outputs=(60, 90)))
    streams[0].wait_tokens(3)
    assert serving.terminate() == 0
    standby.wait_line("^seated")
    streams.check()
    assert roles(caller) == ([standby.pid], [])


def test_workers_keep_their_roles_when_the_scheduler_is_restarted(rig: Rig) -> None:
    """The worker that took over serves again, and not the one that waits."""
    scheduler, serving, caller = rig.serve(*SHAPE)
    first = rig.worker(*SHAPE, "--standby")
    caller.wait_load(lambda load: load.standby_workers == 1)
    second = rig.worker(*SHAPE, "--standby")
    caller.wait_load(lambda load: load.standby_workers == 2)
    serving.kill()
    first.wait_line("^seated")
    for _ in range(2):
        scheduler.kill()
        scheduler = rig.scheduler()
        caller = rig.ready_caller(scheduler)
        caller.wait_load(lambda load: load.standby_workers == 1)
        assert roles(caller) == ([first.pid], [second.pid])


def test_a_standby_worker_alone_serves(rig: Rig) -> None:
    _, worker, caller = rig.serve(*SHAPE, "--standby")
    worker.wait_line("^seated")
    [ask] = random_asks(1, seed=8, prompts=(1, 40), outputs=(20, 30))
    answer(caller, ask)
