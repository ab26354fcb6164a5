"""Workers on other hosts: TCP and CURVE, keys that are removed, strangers on the port, a cable that is pulled.

The tests of the cable have the worker in a network namespace of its own; the others use the loopback address.
"""

import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.rigs import network
from tests.rigs.network import Network
from tests.rigs.processes import Child, Rig, SchedulerProcess, run
from tests.rigs.remote import RemoteKeys
from tests.rigs.streams import Caller
from tests.rigs.waiting import until
from tests.system.asks import Ask, Sent, random_asks, send

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")

SHAPE = ("--page-size", "4", "--num-pages", "1024", "--max-rows", "16", "--max-length", "1024", "--token-budget", "128")
SLOW = ("--step-ms", "2")
# The real worker's link around the executor of the checking one.
LINKED = "tests.rigs.linked_worker"

_WHY_NOT = network.why_not()
needs_network = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "none")


@pytest.fixture
def net() -> Iterator[Network]:
    with Network() as net:
        yield net


def serve(
    rig: Rig,
    net: Network | None,
    *scheduler_flags: str,
    worker_flags: tuple[str, ...] = (),
    program: str = "tests.rigs.checking_worker",
) -> tuple[SchedulerProcess, Child, Caller, RemoteKeys]:
    """A scheduler here, and a worker in the other namespace if there is one."""
    keys = RemoteKeys(rig, "far", "other")
    host = "127.0.0.1" if net is None else net.address
    scheduler = rig.scheduler(*keys.scheduler_flags(host), *scheduler_flags)
    flags = (*SHAPE, *SLOW, *worker_flags, *keys.worker_flags(scheduler, "far"))
    worker = rig.worker(*flags, within=[] if net is None else net.within, program=program)
    caller = rig.ready_caller(scheduler)
    return scheduler, worker, caller, keys


def running(caller: Caller, count: int, seed: int) -> Sent:
    return send(caller, random_asks(count, seed=seed, prompts=(1, 40), outputs=(150, 250)), tokens=5)


def restore(net: Network, worker: Child) -> None:
    """Plugs the cable in again, and waits until the worker has joined."""
    num_lines = len(worker.lines)
    net.restore()
    worker.wait_line("^joined", after=num_lines)


@needs_network
def test_a_pulled_cable_is_noticed_between_steps_and_costs_none_of_sixteen_streams(rig: Rig, net: Network) -> None:
    """At first neither a step nor the worker's own heartbeats could show it: both may take an hour."""
    slow = ("--silence-timeout-seconds", "3600", "--step-timeout-seconds", "3600")
    scheduler, worker, caller, _ = serve(rig, net, *slow, program=LINKED)
    net.cut()
    caller.wait_load(lambda load: load.workers == 0)
    scheduler.wait_line(r"worker w-\S+@far lost: its connection ended")
    restore(net, worker)
    caller.wait_load(lambda load: load.workers == 1)
    streams = running(caller, 16, seed=1)
    net.cut()
    caller.wait_load(lambda load: load.workers == 0)
    assert not any(stream.ended for stream in streams)
    restore(net, worker)
    streams.check()
    assert set(streams.worker_changes()) == {1}
    caller.wait_idle()


@pytest.mark.long
@needs_network
@pytest.mark.parametrize("program", [LINKED, "tests.rigs.checking_worker"])
def test_a_cable_that_is_loose_costs_no_stream(rig: Rig, net: Network, program: str) -> None:
    """Away for times around those after which both ends give the connection up, each at its own time."""
    _, _, caller, _ = serve(rig, net, program=program)
    rng = random.Random(8)
    streams = send(caller, random_asks(16, seed=8, prompts=(1, 40), outputs=(800, 900)))
    for _ in range(8):
        before = sum(len(stream.transcript.tokens) for stream in streams)
        until(lambda before=before: sum(len(stream.transcript.tokens) for stream in streams) >= before + 200, "tokens")
        net.cut()
        time.sleep(rng.choice([0.2, 1.0, *(rng.uniform(1.9, 3.0) for _ in range(4))]))
        net.restore()
    streams.check()
    caller.wait_idle()


@pytest.mark.long
@needs_network
def test_streams_of_a_worker_behind_a_pulled_cable_go_on_at_another_one(rig: Rig, net: Network) -> None:
    _, far, caller, _ = serve(rig, net)
    near = rig.worker(*SHAPE, *SLOW)
    near.wait_line("^joined")
    streams = running(caller, 12, seed=3)
    assert sorted(one.pid for one in caller.load().per_worker) == [0, near.pid]
    net.cut()
    streams.check()
    changes = streams.worker_changes()
    assert set(changes) == {0, 1}
    restore(net, far)
    caller.wait_idle()


@pytest.mark.long
def test_a_hung_worker_whose_connection_stands_is_given_up_by_its_step(rig: Rig) -> None:
    """ZeroMQ's heartbeats are answered by a thread that does not hang. A process of that number here lives on."""
    scheduler, _, caller, keys = serve(rig, None, worker_flags=("--hang-step", "12"))
    streams = running(caller, 4, seed=4)
    again = rig.worker(*SHAPE, *SLOW, *keys.worker_flags(scheduler, "other"))
    again.wait_line("^joined")
    streams.check()
    scheduler.wait_line(r"worker w-\S+@far lost: its step 1\d has no result")
    caller.wait_idle()


def test_a_removed_key_shuts_its_worker_out_and_a_restored_one_lets_it_in(rig: Rig) -> None:
    scheduler, worker, caller, keys = serve(rig, None)
    streams = running(caller, 4, seed=5)
    away = keys.shut_out("far")
    scheduler.wait_line(r"worker w-\S+@far lost: its key is no longer admitted")
    scheduler.wait_line("refused a worker at 127.0.0.1: its public key ")
    assert caller.load().workers == 0
    num_lines = len(worker.lines)
    shutil.move(away, keys.public_file("far"))
    worker.wait_line("^joined", after=num_lines)
    streams.check()
    caller.wait_idle()
    secrets = [path.read_text().strip() for path in keys.folder.rglob("*.secret")]
    logged = "\n".join(line for child in rig.children for line in child.lines)
    assert len(secrets) == 3 and not [secret for secret in secrets if secret in logged]


def test_strangers_on_the_port_harm_nobody_and_fill_no_log(rig: Rig) -> None:
    scheduler, _, caller, keys = serve(rig, None)
    address = keys.worker_flags(scheduler, "far")[1]
    host, port = address.removeprefix("tcp://").split(":")
    streams = running(caller, 4, seed=6)
    open_ones = [socket.create_connection((host, int(port)), 10) for _ in range(50)]
    for length in range(300):
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(os.urandom(length))
    # Greetings of ZMTP, and then frames that claim to be large, for which no memory may be taken.
    before = psutil.Process(scheduler.pid).memory_info().rss
    for mechanism in (b"NULL", b"CURVE"):
        for num_bytes in (1 << 62, *[100 << 20] * 10):
            stranger = socket.create_connection((host, int(port)), 10)
            greeting = b"\xff" + bytes(8) + b"\x7f\3\1" + mechanism.ljust(20, b"\0") + bytes(32)
            stranger.sendall(greeting + b"\x06" + num_bytes.to_bytes(8, "big") + os.urandom(1000))
            open_ones.append(stranger)
    streams.check()
    assert psutil.Process(scheduler.pid).memory_info().rss - before < 64 << 20
    for stranger in open_ones:
        stranger.close()
    caller.wait_idle()
    assert caller.load().workers == 1
    about = [line for line in scheduler.lines if re.search(r"refused|ended before a worker joined", line)]
    assert len(about) < 10


@pytest.mark.long
@pytest.mark.parametrize("which", ["worker", "scheduler"])
def test_a_process_that_stood_still_for_five_seconds_costs_no_stream(rig: Rig, which: str) -> None:
    """Its threads stand still too, so the other end gives the connection up; it learns that when it goes on."""
    scheduler, worker, caller, _ = serve(rig, None, program=LINKED)
    streams = running(caller, 16, seed=9)
    frozen = worker if which == "worker" else scheduler
    num_lines = len(worker.lines)
    frozen.signal(signal.SIGSTOP)
    time.sleep(5.0)
    frozen.signal(signal.SIGCONT)
    worker.wait_line("^joined", after=num_lines)
    streams.check()
    caller.wait_idle()


@pytest.mark.long
def test_a_scheduler_that_starts_again_at_its_address_is_joined_again(rig: Rig) -> None:
    scheduler, worker, _, keys = serve(rig, None)
    address = keys.worker_flags(scheduler, "far")[1]
    num_lines = len(worker.lines)
    scheduler.kill()
    again = rig.scheduler("--workers-listen", address, "--workers-keys", str(keys.folder))
    worker.wait_line("^joined", after=num_lines)
    caller = rig.ready_caller(again)
    streams = running(caller, 2, seed=7)
    streams.check()
    caller.wait_idle()


@pytest.mark.long
def test_the_real_worker_serves_over_tcp_and_comes_back_after_a_pulled_cable(rig: Rig) -> None:
    """Its connection, its key and its Join; the tokens of a greedy request are the same before and after."""
    keys = RemoteKeys(rig, "far")
    net = None if _WHY_NOT else Network()
    try:
        if net is not None:
            net.__enter__()
        scheduler = rig.scheduler(*keys.scheduler_flags("127.0.0.1" if net is None else net.address))
        flags = ["gpu_worker", "--runtime-dir", str(rig.runtime_dir / "far"), "--device", "cpu", "--threads", "1"]
        within = [] if net is None else net.within
        worker = rig.start("worker", *flags, "--num-pages", "64", *keys.worker_flags(scheduler, "far"), within=within)
        caller = rig.ready_caller(scheduler)
        worker.wait_line("ready: this worker serves the scheduler at tcp://")
        assert "the KV pool ends with this worker, because its scheduler is on another host" in worker.output()
        ask = Ask(prompt=(5, 6, 7), max_new_tokens=40)
        first = caller.generate(ask.request()).result().samples[0].tokens
        if net is not None:
            net.cut()
            caller.wait_load(lambda load: load.workers == 0)
            net.restore()
            caller.wait_load(lambda load: load.workers == 1)
        assert len(first) == 40 and caller.generate(ask.request()).result().samples[0].tokens == first
        assert worker.terminate() == 0
        caller.wait_load(lambda load: load.workers == 0)
    finally:
        if net is not None:
            net.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("scheduler_svc", ["--workers-listen", "tcp://127.0.0.1:0", "--listen", "127.0.0.1:0"]),
        ("gpu_worker", ["--connect", "tcp://127.0.0.1:1"]),
    ],
)
def test_tcp_without_keys_is_refused_by_both_programs(program: str, arguments: list[str], rig: Rig) -> None:
    done = run(program, "--runtime-dir", str(rig.runtime_dir / "x"), *arguments)
    assert done.returncode == 2
    assert "needs keys" in done.stderr or "need keys" in done.stderr
    assert "`tandem keys DIR" in done.stderr and done.stderr.count("\n") == 1
