"""Workers that Ray placed, lost in each way under running streams: every stream equals the oracle.

Each test prints the seconds from the loss to tokens and to a full fleet; `make test-ray ARGS=-s` shows them.
"""

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

from tandem_contract.plural import numbered
from tests.cluster.local_cluster import LocalCluster, resume
from tests.rigs.processes import Rig
from tests.rigs.remote import RemoteKeys
from tests.rigs.streams import Caller, Stream
from tests.system.asks import Ask, random_asks

NUM_STREAMS = 16
SHAPE = ("--page-size", "4", "--num-pages", "8192", "--max-rows", "16", "--max-length", "1024", "--token-budget", "128")
# The real worker's link around the executor of the checking one.
LINKED = ("--module", "tests.rigs.linked_worker", "--gpus", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


class Fleet:
    """A scheduler of this machine, and workers of the cluster. Leaving the context ends these."""

    def __init__(self, rig: Rig, cluster: LocalCluster, count: int, *flags: str) -> None:
        self._rig, self._cluster, self.count, self._flags = rig, cluster, count, flags

    def __enter__(self) -> "Fleet":
        self.keys = RemoteKeys(self._rig, "far")
        self.scheduler = self._rig.scheduler(*self.keys.scheduler_flags())
        own = ("--runtime-dir", str(self._rig.runtime_dir), "--violations", str(self._rig.violations_file))
        place = ("--workers", str(self.count), *self.keys.worker_flags(self.scheduler, "far"), *LINKED, *self._flags)
        begun = time.monotonic()
        output = self._cluster.command("up", *place, "--", *own, *SHAPE, "--step-ms", "2")
        say(f"{self.count} workers placed and joined after", time.monotonic() - begun)
        assert f"{self.count} of {numbered(self.count, 'worker', 'serve')}" in output
        self.caller = self._rig.caller(self.scheduler)
        self.caller.wait_load(lambda load: load.workers == self.count)
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.command("down")

    def serving(self, *, without: Sequence[int] = ()) -> list[dict[str, Any]]:
        """The reports once all of its workers serve, none of them with one of these process ids."""

        def is_full(found: list[dict[str, Any]]) -> bool:
            return len(found) == self.count and all(
                each["state"] == "serving" and each["pid"] not in without for each in found
            )

        return self._cluster.wait_status(is_full)


def say(what: str, seconds: float) -> None:
    print(f"\n{what} {seconds:.2f} s", flush=True)


def running(caller: Caller, seed: int) -> tuple[list[Ask], list[Stream]]:
    asks = random_asks(NUM_STREAMS, seed=seed, prompts=(1, 40), outputs=(800, 900))
    streams = [caller.generate(ask.request()) for ask in asks]
    for stream in streams:
        stream.wait_tokens(5)
    return asks, streams


def check(asks: list[Ask], streams: list[Stream]) -> None:
    for ask, stream in zip(asks, streams, strict=True):
        ask.check(stream.result(60.0))


def survive(fleet: Fleet, cause: str, seed: int, lose: Callable[[], Sequence[int]]) -> None:
    """Runs streams while `lose` takes workers away and returns their process ids."""
    asks, streams = running(fleet.caller, seed)
    begun = time.monotonic()
    lost = lose()
    fleet.caller.wait_load(lambda load: load.workers < fleet.count)
    say(f"{cause}: the scheduler noticed after", time.monotonic() - begun)
    fleet.caller.wait_load(lambda load: load.workers == fleet.count, 60.0)
    say(f"{cause}: all workers have joined again after", time.monotonic() - begun)
    check(asks, streams)
    gaps = [after - before for stream in streams for before, after in itertools.pairwise(stream.times) if after > begun]
    say(f"{cause}: the longest pause of {NUM_STREAMS} streams was", max(gaps))
    fleet.serving(without=lost)
    fleet.caller.wait_idle()


@pytest.mark.parametrize("count", [2, 1])
def test_a_node_that_is_killed_costs_no_stream_and_its_worker_moves(
    rig: Rig, cluster: LocalCluster, count: int
) -> None:
    with Fleet(rig, cluster, count) as fleet:
        pid = fleet.serving()[0]["pid"]
        node = cluster.node_of(pid)

        def lose() -> list[int]:
            cluster.kill(node)
            return [pid]

        survive(fleet, f"node killed, {count} workers", count, lose)
        cluster.add()


def test_a_node_that_is_silent_is_given_up_and_ends_what_it_runs_when_it_is_back(
    rig: Rig, cluster: LocalCluster
) -> None:
    with Fleet(rig, cluster, 1) as fleet:
        pid = fleet.serving()[0]["pid"]
        frozen: list[psutil.Process] = []

        def lose() -> list[int]:
            frozen.extend(cluster.freeze(cluster.node_of(pid)))
            return [pid]

        survive(fleet, "node silent", 3, lose)
        assert psutil.pid_exists(pid)
        resume(frozen)
        psutil.wait_procs(frozen, timeout=60)
        assert not [process for process in frozen if process.is_running() and process.status() != "zombie"]
        fleet.caller.wait_load(lambda load: load.workers == 1)
        cluster.add()


@pytest.mark.parametrize("of", ["worker", "actor"])
def test_a_process_that_is_killed_is_started_again_on_its_node(rig: Rig, cluster: LocalCluster, of: str) -> None:
    with Fleet(rig, cluster, 1) as fleet:
        pid = fleet.serving()[0]["pid"]
        node = cluster.node_of(pid)

        def lose() -> list[int]:
            os.kill(pid if of == "worker" else psutil.Process(pid).ppid(), signal.SIGKILL)
            return [pid]

        survive(fleet, f"{of} killed", 4, lose)
        again = fleet.serving(without=[pid])[0]
        assert of == "actor" or cluster.node_of(again["pid"]) is node
        assert not psutil.pid_exists(pid)


def test_the_fleet_grows_and_shrinks_under_streams(rig: Rig, cluster: LocalCluster) -> None:
    with Fleet(rig, cluster, 1) as fleet:
        asks, streams = running(fleet.caller, 5)
        cluster.command("scale", "3")
        fleet.caller.wait_load(lambda load: load.workers == 3)
        refused = cluster.command("scale", "5", "--place-seconds", "1", code=1)
        assert "1 of 2 workers found 0 GPU and 1 CPU free on a node; nodes: " in refused
        assert [each["state"] for each in cluster.status()] == ["serving"] * 3
        place = (*fleet.keys.worker_flags(fleet.scheduler, "far"), *LINKED)
        assert "workers of tandem are up" in cluster.command("up", *place, code=1)
        cluster.command("scale", "1")
        check(asks, streams)
        fleet.caller.wait_load(lambda load: load.workers == 1)


def test_a_worker_that_cannot_start_is_given_up_with_its_own_words_until_it_is_retried(
    rig: Rig, cluster: LocalCluster
) -> None:
    """The real worker checks its settings before it imports torch, which this environment lacks."""
    keys = RemoteKeys(rig, "far")
    scheduler = rig.scheduler(*keys.scheduler_flags())
    connect, address, flag, folder = keys.worker_flags(scheduler, "far")
    away = shutil.move(folder, f"{folder}.away")
    try:
        refused = cluster.command("up", connect, address, flag, folder, "--", "--device", "cpu", code=1)
        assert "given up" in refused and ": ended with exit code 2: " in refused
        assert f"{folder}/worker.secret cannot be read: No such file or directory" in refused
        assert "0 of 1 worker serves" in refused
        shutil.move(away, folder)
        assert "worker 0" in cluster.command("retry")
        [report] = cluster.wait_status(lambda found: "torch" in found[0]["cause"])
        assert report["num_starts"] >= 2
    finally:
        assert "1 worker of tandem ended" in cluster.command("down")


def test_an_address_without_a_cluster_is_refused_at_once(cluster: LocalCluster) -> None:
    begun = time.monotonic()
    refused = cluster.command("status", "--address", "127.0.0.1:1", code=1)
    assert "no cluster at 127.0.0.1:1: connection refused" in refused
    assert "Traceback" not in refused
    say("an address without a cluster is refused after", time.monotonic() - begun)


def test_streams_go_on_when_the_head_is_gone(rig: Rig) -> None:
    """Nothing that a stream needs passes through Ray. A cluster without its head cannot end its workers either."""
    with LocalCluster() as cluster:
        fleet = Fleet(rig, cluster, 1)
        fleet.__enter__()
        pid = fleet.serving()[0]["pid"]
        asks, streams = running(fleet.caller, 6)
        cluster.kill_head()
        check(asks, streams)
        again, more = running(fleet.caller, 7)
        check(again, more)
        assert psutil.pid_exists(pid)
        begun = time.monotonic()
        assert "no cluster at" in cluster.command("status", code=1)
        say("without its head, status fails after", time.monotonic() - begun)
