"""A worker with two ranks on two hosts, that is in two network namespaces: tokens, and losses in mid-stream.

The ranks share the bundled model over gloo and a pair of virtual cables. The tests of one place of the meeting share
one service; each can run alone. The seconds that are printed count from the loss.
"""

import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tandem_client import Client
from tests.rigs import network
from tests.rigs.network import Network
from tests.rigs.processes import Child, Rig
from tests.rigs.remote import RemoteKeys
from tests.rigs.waiting import until
from tests.system.real_service import ROOMY_PAGES, SHAPE, TIMEOUT_SECONDS, bundled_cases, read_cases
from tests.system.test_worker_group import assert_equal_but_for_ties

_WHY_NOT = network.why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "none")]
NUM_STREAMS = 12


class TwoHosts:
    """A scheduler here, and a launcher with one rank here and in the other namespace."""

    def __init__(self, rig: Rig, net: Network, meeting: str) -> None:
        self._rig, self.net = rig, net
        keys = RemoteKeys(rig, "group")
        scheduler = rig.scheduler(*keys.scheduler_flags(net.address))
        # Both namespaces have this process's ports; no process listens at that of a closed socket.
        with socket.create_server((net.address, 0)) as free:
            port = free.getsockname()[1]
        sizes = f"{SHAPE} --threads 1 --device cpu --num-pages {ROOMY_PAGES} --exit-with-parent"
        ranks = f"--ranks 2 --nnodes 2 --rdzv-endpoint {meeting}:{port}"
        self._flags = [*sizes.split(), *ranks.split(), *keys.worker_flags(scheduler, "group")]
        self.launchers = {place: self.start(place) for place in ("near", "far")}
        self.client = Client(scheduler.address)
        self.client.wait_ready(TIMEOUT_SECONDS)

    def start(self, place: str) -> Child:
        arguments = ["gpu_worker", "--runtime-dir", str(self._rig.runtime_dir / place), *self._flags]
        # `env` prevents a fork: tests distinguish the ranks by the environment, which a forked process hides.
        within = self.net.within if place == "far" else ["env"]
        return self._rig.start(f"{place} launcher", *arguments, within=within, environment={"OMP_NUM_THREADS": "1"})

    def rank(self, place: str) -> psutil.Process:
        [found] = psutil.Process(self.launchers[place].pid).children()
        return found

    def wait_workers(self, count: int) -> float:
        """Waits until `count` workers serve. Returns the time."""
        until(lambda: self.client.load().workers == count, f"{count} workers")
        return time.monotonic()


@pytest.fixture(scope="module", params=["here", "there"])
def hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    with Network() as net, Rig() as rig:
        made = TwoHosts(rig, net, net.address if request.param == "here" else net.far_address)
        yield made
        made.client.close()


def test_ranks_on_two_hosts_compute_the_tokens_of_the_whole_model(hosts: TwoHosts) -> None:
    [info] = hosts.client.load().per_worker
    assert info.device == "2 x cpu"
    assert {hosts.rank(place).environ()["LOCAL_WORLD_SIZE"] for place in ("near", "far")} == {"1"}
    [follows] = [each for each in hosts.launchers.values() if "ready: this rank follows" in each.output()]
    assert "worker rank 1 INFO whole start" in follows.output() and "joined the scheduler" not in follows.output()
    assert_equal_but_for_ties(bundled_cases(), read_cases(hosts.client, bundled_cases()).result())


LOSSES: dict[str, Callable[[TwoHosts], None]] = {
    "rank here killed": lambda hosts: hosts.rank("near").kill(),
    "rank there killed": lambda hosts: hosts.rank("far").kill(),
    "rank there stopped": lambda hosts: hosts.rank("far").suspend(),
    "launcher here killed": lambda hosts: hosts.launchers["near"].kill(),
    "launcher there killed": lambda hosts: hosts.launchers["far"].kill(),
    "cable pulled": lambda hosts: hosts.net.cut(),
}


@pytest.mark.parametrize("between_steps", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_host_changes_no_stream(hosts: TwoHosts, loss: str, between_steps: bool) -> None:
    cases = bundled_cases()[:NUM_STREAMS]
    hosts.wait_workers(1)
    num_lines = {place: len(launcher.lines) for place, launcher in hosts.launchers.items()}
    reading = None
    if not between_steps:
        reading = read_cases(hosts.client, cases)
        reading.wait_tokens(60)
    begun = time.monotonic()
    LOSSES[loss](hosts)
    noticed = hosts.wait_workers(0) - begun
    before = 0 if reading is None else sum(len(output.tokens) for output in reading.outputs)
    if not loss.startswith("rank"):
        for place, launcher in hosts.launchers.items():
            if not launcher.killed:
                launcher.wait_line(r"met at|waiting for the other hosts", TIMEOUT_SECONDS, after=num_lines[place])
    waited = time.monotonic() - begun
    for place in [place for place, launcher in hosts.launchers.items() if launcher.killed]:
        hosts.launchers[place] = hosts.start(place)
    if loss == "cable pulled":
        hosts.net.restore()
    if reading is None:
        reading = read_cases(hosts.client, cases)
    reading.wait_tokens(before + 1)
    again = time.monotonic() - begun
    print(f"{loss}: lost after {noticed:.1f} s, others wait after {waited:.1f} s, tokens after {again:.1f} s")
    assert_equal_but_for_ties(cases, reading.result())


def test_a_stopped_host_is_waited_for_and_a_stopped_leader_ends_the_group(hosts: TwoHosts) -> None:
    """The last test of its service: nothing serves afterwards."""
    hosts.wait_workers(1)
    leader, other = sorted(hosts.launchers, key=lambda place: hosts.rank(place).environ()["RANK"])
    num_lines = len(hosts.launchers[leader].lines)
    assert hosts.launchers[other].terminate() == 0
    hosts.wait_workers(0)
    hosts.launchers[leader].wait_line("met at|waiting for the other hosts", after=num_lines)
    hosts.launchers[other] = hosts.start(other)
    hosts.wait_workers(1)
    assert hosts.launchers[leader].terminate() == 0
    assert hosts.launchers[other].wait() == 0
    hosts.wait_workers(0)
