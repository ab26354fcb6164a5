"""Envoy with the committed file in front of three services: what the file and its README promise.

Skipped on a machine without Envoy: the variable TANDEM_ENVOY names the program, or it is on PATH.
"""

import base64
import itertools
import json
import math
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from tandem.v1 import control_pb2
from tandem.v1 import inference_pb2 as pb

from tandem_client import Client
from tandem_client.types import FinishReason
from tandem_client.wire.request import AFFINITY_KEY, SERVICE_KEY
from tests.client.gateway.conftest import gateway_with
from tests.rigs.envoy import FILE, HOW_TO_INSTALL, Envoy, find_envoy, validated
from tests.rigs.processes import Child, Rig, SchedulerProcess, child_environment, run
from tests.rigs.streams import Caller, Stream, code_of, details_of
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_envoy() is None, reason=HOW_TO_INSTALL),
]
SHAPE = ("--page-size", "4", "--num-pages", "4096", "--max-rows", "32", "--max-length", "4096", "--step-ms", "2")
NUM_CELLS = 3
# Longer than any test needs.
LONG = Ask(prompt=tuple(b"a long one"), max_new_tokens=4000)
SHORT = Ask(prompt=tuple(b"a short one"), max_new_tokens=10)
# A process that begins a request, prints what another one needs, and dies.
BEGINS = """
import json, os, sys
from tandem_client import Client
address, prompt, max_new_tokens = sys.argv[1:]
stream = Client(address).generate(
    json.loads(prompt), max_new_tokens=int(max_new_tokens), temperature=0.0, ignore_eos=True, linger_seconds=600.0
)
next(stream)
accepted = stream.accepted
print(json.dumps({"id": accepted.request_id, "secret": accepted.resume_secret.hex(), "service": stream.service}))
sys.stdout.flush()
os._exit(0)
"""


def envoy_program() -> str:
    program = find_envoy()
    assert program is not None
    return program


class Fleet:
    """Services with a worker each, Envoy in front of them, and a caller of Envoy and of each service."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        *,
        workers: bool = True,
        flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
    ) -> None:
        self.rigs = [stack.enter_context(Rig()) for _ in range(NUM_CELLS)]
        self.workers: list[Child] = [rig.worker(*SHAPE, *worker_flags) for rig in self.rigs if workers]
        self.schedulers: list[SchedulerProcess] = [rig.launch_scheduler(*flags) for rig in self.rigs]
        self.addresses = [scheduler.address for scheduler in self.schedulers]
        self.callers = [rig.caller(each) for rig, each in zip(self.rigs, self.schedulers, strict=True)]
        for caller in self.callers:
            if workers:
                caller.wait_serving()
        self.envoy = stack.enter_context(Envoy(envoy_program(), folder, self.addresses))
        self.front = Caller(self.envoy.address)
        stack.callback(self.front.close)

    def wait_healthy(self, *away: int) -> None:
        """Waits until Envoy knows that all cells but these serve."""
        self.envoy.wait_healthy([each for number, each in enumerate(self.addresses) if number not in away])

    def kill(self, cell: int) -> None:
        """Kills a cell's front end and core at the same time, as the death of a machine does."""
        scheduler = self.schedulers[cell]
        frontend = psutil.Process(scheduler.frontend_pid())
        # A core that runs would start another front end.
        scheduler.signal(signal.SIGSTOP)
        frontend.kill()
        scheduler.kill()

    def send(self, ask: Ask, key: str, *metadata: tuple[str, str]) -> Stream:
        return self.front.generate(ask.request(), metadata=[(AFFINITY_KEY, key), *metadata])

    def running(self) -> list[int]:
        return [caller.load().running for caller in self.callers]

    def home(self, key: str) -> int:
        """The cell that a request of this key goes to."""
        stream = self.send(SHORT, key)
        SHORT.check(stream.result())
        return self.addresses.index(base64.b64decode(stream.metadata()[SERVICE_KEY]).decode())

    def key_of(self, cell: int) -> str:
        return next(key for key in map(str, itertools.count()) if self.home(key) == cell)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(stack, tmp_path)
        made.wait_healthy()
        yield made


def test_envoy_accepts_the_file_as_it_is() -> None:
    result = validated(envoy_program(), FILE)
    assert result.returncode == 0 and "OK" in result.stdout + result.stderr, result.stderr
    assert "deprecated" not in (result.stdout + result.stderr).lower()


def test_equal_keys_go_to_one_cell_and_others_to_all(fleet: Fleet) -> None:
    homes = {key: fleet.home(key) for key in map(str, range(24))}
    assert set(homes.values()) == set(range(NUM_CELLS))
    assert {key: fleet.home(key) for key in homes} == homes
    # Tandem's client sends its key by itself: the second request of a beginning finds its pages.
    with Client(fleet.envoy.address) as client:
        for first in range(6):
            prompt = [first, *range(256)]
            hits: list[int] = []
            for last in range(3):
                stream = client.generate([*prompt, 100 + last], max_new_tokens=4, temperature=0.0)
                assert list(stream) and stream.summary is not None
                hits.append(stream.summary.usage.cached_prompt_tokens)
            assert hits == [0, 256, 256]


def test_a_cell_has_at_most_one_request_more_than_its_share(fleet: Fleet) -> None:
    """A cell gets a request while it has at most 1.25 times its share of all, that request counted."""
    streams: list[Stream] = []
    for number in range(30):
        streams.append(fleet.send(LONG, "same"))
        streams[-1].wait_tokens(1)
        share = math.ceil(math.ceil(1.25 * (number + 1)) / NUM_CELLS)
        assert max(fleet.running()) <= share + 1
    assert sum(fleet.running()) == 30
    for stream in streams:
        stream.cancel()
    for caller in fleet.callers:
        caller.wait_idle()


def test_tokens_pass_while_the_rest_is_computed_and_a_cancelled_stream_ends(fleet: Fleet) -> None:
    stream = fleet.send(LONG, "one")
    stream.wait_tokens(1)
    home = fleet.callers[fleet.running().index(1)]
    assert len(stream.transcript.tokens) < LONG.max_new_tokens / 2
    stream.wait_tokens(100)
    # Messages are passed on one by one, not joined.
    assert stream.transcript.num_deltas > 50
    assert home.load().running == 1
    stream.cancel()
    home.wait_idle()


def test_a_dead_cell_loses_its_streams_and_its_keys_move_and_return(fleet: Fleet) -> None:
    key = fleet.key_of(0)
    others = [fleet.key_of(number) for number in (1, 2)]
    asks = [replace(SHORT, prompt=(number, ord("a")), max_new_tokens=400) for number in range(3)]
    streams = [fleet.send(ask, each) for ask, each in zip(asks, [key, *others], strict=True)]
    for stream in streams:
        stream.wait_tokens(1)
    assert fleet.running() == [1, 1, 1]
    fleet.kill(0)
    # After the first frame of an answer Envoy can send no status: it resets the stream, which gRPC reads as INTERNAL.
    assert code_of(streams[0].failed()) == grpc.StatusCode.INTERNAL
    # Before the health checks know, a request that meets the dead cell goes to another one.
    burst = [fleet.send(SHORT, key) for _ in range(40)]
    for stream in burst:
        SHORT.check(stream.result())
    for ask, stream in zip(asks[1:], streams[1:], strict=True):
        ask.check(stream.result())
    fleet.wait_healthy(0)
    assert fleet.home(key) in (1, 2) and [fleet.home(each) for each in others] == [1, 2]
    again = fleet.rigs[0].scheduler(listen=fleet.addresses[0])
    fleet.callers[0] = fleet.rigs[0].caller(again)
    fleet.wait_healthy()
    assert [fleet.home(each) for each in (key, *others)] == [0, 1, 2]


def test_a_full_cell_passes_requests_on_and_its_refusal_keeps_its_details(tmp_path: Path) -> None:
    """Each worker has one row, which is taken, so requests wait; of 3 cells each has room for 2."""
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path, flags=["--max-waiting", "2"], worker_flags=["--max-rows", "1"])
        fleet.wait_healthy()
        running = [caller.generate(LONG.request()) for caller in fleet.callers]
        for stream in running:
            stream.wait_tokens(1)
        waiting = [fleet.send(SHORT, "same") for _ in range(2 * NUM_CELLS)]
        for stream in waiting:
            stream.wait_accepted()
        assert [caller.load().waiting for caller in fleet.callers] == [2] * NUM_CELLS
        error = fleet.send(SHORT, "same").failed()
        assert code_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0
        for stream in running:
            stream.cancel()
        for stream in waiting:
            SHORT.check(stream.result())


def test_resume_and_abort_reach_the_cell_that_the_answer_named(fleet: Fleet) -> None:
    lingering = replace(
        SHORT, max_new_tokens=600, extra=pb.GenerateRequest(resume=pb.ResumeParams(linger_seconds=600.0))
    )
    keys = [fleet.key_of(cell) for cell in range(NUM_CELLS)]
    for cell, key in enumerate(keys):
        first = fleet.send(lingering, key)
        accepted = first.wait_tokens(5).accepted
        assert accepted is not None
        names = [(SERVICE_KEY, first.metadata()[SERVICE_KEY])]
        first.cancel()
        # Another beginning, so the way does not follow from the key.
        elsewhere = (AFFINITY_KEY, keys[(cell + 1) % NUM_CELLS])
        request = pb.ResumeRequest(request_id=accepted.request_id, resume_secret=accepted.resume_secret)
        lingering.check(fleet.front.resume(request, metadata=[*names, elsewhere]).result())
        stream = fleet.send(LONG, key)
        accepted = stream.wait_accepted().accepted
        assert accepted is not None
        outcomes = fleet.front.abort(accepted.request_id, metadata=[*names, elsewhere])
        assert outcomes == [control_pb2.ABORT_OUTCOME_ABORTED]
        finished = stream.result().finished
        assert finished is not None and finished.reason == pb.FINISH_REASON_ABORTED
    fleet.kill(2)
    fleet.wait_healthy(2)
    with pytest.raises(grpc.RpcError) as raised:
        fleet.front.abort("any", metadata=names)
    assert code_of(raised.value) == grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def slow_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Its long requests outlast the start of a process."""
    with ExitStack() as stack:
        made = Fleet(stack, tmp_path, worker_flags=["--step-ms", "10"])
        made.wait_healthy()
        yield made


def test_other_processes_resume_and_abort_by_the_service_that_a_stream_told(slow_fleet: Fleet) -> None:
    address, homes = slow_fleet.envoy.address, set[str]()
    for number in itertools.count():
        ask = replace(LONG, prompt=(number, 1, 2))
        command = [sys.executable, "-P", "-c", BEGINS, address, json.dumps(ask.prompt), str(ask.max_new_tokens)]
        begun = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
        assert begun.returncode == 0, begun.stderr
        found = json.loads(begun.stdout)
        with Client(address) as client:
            resumed = client.resume(found["id"], bytes.fromhex(found["secret"]), service=found["service"])
            next(resumed)
            abort(address, found["id"], found["service"])
            for _ in resumed:
                pass
        [sample] = resumed.samples
        assert sample.finished is not None and sample.finished.reason == FinishReason.ABORTED
        assert 0 < len(sample.token_ids) < ask.max_new_tokens
        assert list(sample.token_ids) == ask.expected().tokens[: len(sample.token_ids)]
        homes.add(found["service"])
        if len(homes) == NUM_CELLS:
            break
    assert sorted(base64.b64decode(each).decode() for each in homes) == sorted(slow_fleet.addresses)


def test_a_request_of_the_gateway_is_aborted_by_the_headers_of_its_answer(slow_fleet: Fleet) -> None:
    with gateway_with("--address", slow_fleet.envoy.address) as (_, url):
        for number in range(4):
            asked = {"prompt": [number, 2, 3], "max_tokens": LONG.max_new_tokens, "ignore_eos": True, "stream": True}
            ask = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(ask, timeout=TIMEOUT_SECONDS) as answer:
                abort(slow_fleet.envoy.address, answer.headers["x-request-id"], answer.headers["x-tandem-service"])
                assert b'"stop_reason": "aborted"' in answer.read()


def abort(address: str, request_id: str, service: str) -> None:
    done = run("tandem_client.cli", "abort", "-a", address, request_id, "--service", service)
    assert (done.returncode, done.stdout) == (0, f"{request_id} aborted\n"), done.stderr


def test_a_cell_that_is_stopping_gets_no_requests_but_aborts_of_its_own(fleet: Fleet) -> None:
    stream = fleet.send(LONG, "one")
    accepted = stream.wait_tokens(1).accepted
    assert accepted is not None
    home = fleet.running().index(1)
    fleet.schedulers[home].signal(signal.SIGTERM)
    fleet.wait_healthy(home)
    assert fleet.home("one") != home
    stream.wait_tokens(len(stream.transcript.tokens) + 10)
    names = [(SERVICE_KEY, stream.metadata()[SERVICE_KEY])]
    assert fleet.front.abort(accepted.request_id, metadata=names) == [control_pb2.ABORT_OUTCOME_ABORTED]
    stream.result()
    assert fleet.schedulers[home].wait() == 0


def test_the_client_resumes_through_envoy_when_a_front_end_dies(fleet: Fleet) -> None:
    ask = replace(SHORT, max_new_tokens=800)
    with Client(fleet.envoy.address) as client:
        stream = client.generate(list(ask.prompt), max_new_tokens=800, temperature=0.0, ignore_eos=True, resume=True)
        next(stream)
        scheduler = fleet.schedulers[fleet.running().index(1)]
        psutil.Process(scheduler.frontend_pid()).kill()
        for _ in stream:
            pass
        assert list(stream.samples[0].token_ids) == ask.expected().tokens


def test_calls_about_one_service_are_no_calls_of_envoy(fleet: Fleet) -> None:
    assert fleet.front.model_info() == fleet.callers[0].model_info()
    with pytest.raises(grpc.RpcError) as raised:
        fleet.front.load()
    assert code_of(raised.value) == grpc.StatusCode.UNIMPLEMENTED


def test_a_stream_without_a_word_outlives_the_pings_of_its_connection(fleet: Fleet) -> None:
    """A service ends a connection that pings more often than each 9 s, so three pings have to pass."""
    home = fleet.home("quiet")
    stream = fleet.send(LONG, "quiet")
    stream.wait_tokens(5)
    fleet.workers[home].kill()
    stream._thread.join(38.0)
    assert not stream.ended
    seen = len(stream.transcript.tokens)
    fleet.rigs[home].worker(*SHAPE)
    stream.wait_tokens(seen + 20)
    # GOAWAY of a service to Envoy.
    assert fleet.envoy.counter("cluster.cells.upstream_cx_close_notify") == 0
    stream.cancel()
    fleet.callers[home].wait_idle()
