"""Workers on other hosts: TCP and CURVE, keys that are removed, strangers on the port, a cable that is pulled."""

from collections.abc import Iterator

import pytest

from tests.rigs import network
from tests.rigs.network import Network
from tests.rigs.processes import Child, Rig, SchedulerProcess
from tests.rigs.remote import RemoteKeys
from tests.rigs.streams import Caller
from tests.system.asks import random_asks

SHAPE = ("--page-size", "4", "--num-pages", "1024", "--max-rows", "16", "--max-length", "1024", "--token-budget", "128")
SLOW = ("--step-ms", "2")

_WHY_NOT = network.why_not()
needs_network = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "there is a network")


@pytest.fixture
def net() -> Iterator[Network]:
    with Network() as net:
        yield net


def serve(rig: Rig, net: Network) -> tuple[SchedulerProcess, Child, Caller, RemoteKeys]:
    """A scheduler here, and a worker in the other namespace."""
    keys = RemoteKeys(rig, "far")
    scheduler = rig.scheduler(*keys.scheduler_flags(net.address))
    worker = rig.worker(*SHAPE, *SLOW, *keys.worker_flags(scheduler, "far"), within=net.within)
    caller = rig.caller(scheduler)
    caller.wait_serving()
    return scheduler, worker, caller, keys


@needs_network
def test_a_cable_pulled_under_sixteen_streams_costs_none_of_them(rig: Rig, net: Network) -> None:
    scheduler, worker, caller, _ = serve(rig, net)
    asks = random_asks(16, seed=1, prompts=(1, 40), outputs=(150, 250))
    streams = [caller.generate(ask.request()) for ask in asks]
    for stream in streams:
        stream.wait_tokens(5)
    num_joins = len([line for line in worker.lines if line.startswith("joined")])
    net.cut()
    caller.wait_load(lambda load: load.workers == 0)
    assert not any(stream.ended for stream in streams)
    net.restore()
    worker.wait_line("^joined", after=len(worker.lines))
    for ask, stream in zip(asks, streams, strict=True):
        ask.check(stream.result())
    assert num_joins == 1
    scheduler.wait_line("worker w-\\S+@far lost: its connection ended")
    caller.wait_idle()
