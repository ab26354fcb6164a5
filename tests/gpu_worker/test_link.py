"""The link to the core: a real socket on each side, a runner that answers at once in place of a device."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.link import JoinRefused, Link
from gpu_worker.wire.frames import Outcome

WAIT_MS = 10_000


class EchoRunner:
    """Answers each plan with its step number as the token."""

    def __init__(self) -> None:
        self.joined: list[int] = []
        self.outcomes: list[Outcome] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.outcomes)

    def join(self, generation: int) -> None:
        self.joined.append(generation)

    def submit(self, message: pb.StepPlan) -> None:
        tokens = np.array([message.step], np.int32)
        outcome = Outcome(generation=message.generation, step=message.step, status=pb.STEP_STATUS_OK, tokens=tokens)
        self.outcomes.append(outcome)

    def collect(self, *, wait: bool = True) -> Outcome | None:
        return self.outcomes.pop(0) if self.outcomes else None


class Core:
    """A ROUTER that says what it is told to say."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.worker = b""

    def expect(self, kind: str) -> pb.WorkerToCore:
        """The next message of a kind; heartbeats in between are passed over."""
        while True:
            assert self.socket.poll(WAIT_MS), f"no {kind}"
            self.worker, frame = self.socket.recv_multipart()
            message = pb.WorkerToCore()
            message.ParseFromString(frame)
            if message.WhichOneof("message") == kind:
                return message
            assert message.WhichOneof("message") == "heartbeat"

    def say(self, **message: object) -> None:
        self.socket.send_multipart([self.worker, pb.CoreToWorker(**message).SerializeToString()])


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/worker.sock"


class Served:
    """A link served on the main thread; `script` plays the core on another and then, to `stop` it, sends a signal."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.runner = EchoRunner()
        self.failure: BaseException | None = None

    def run(self, script: object, *, stop: bool = True) -> None:
        def play() -> None:
            try:
                script()  # type: ignore[operator]
            except BaseException as error:
                self.failure = error
            finally:
                if stop:
                    os.kill(os.getpid(), signal.SIGTERM)

        player = threading.Thread(target=play)
        link = Link(self.endpoint, pb.Join(protocol=1, model="echo"), self.runner, max_in_flight=2)
        player.start()
        try:
            link.serve()
        finally:
            player.join()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def served(endpoint: str) -> Served:
    return Served(endpoint)


@pytest.fixture
def core(endpoint: str) -> Iterator[Core]:
    core = Core(endpoint)
    yield core
    core.socket.close()


def test_join_plans_results_and_leave(served: Served, core: Core) -> None:
    def script() -> None:
        assert core.expect("join").join.model == "echo"
        assert core.worker.startswith(f"w-{os.getpid()}-".encode())
        core.say(joined=pb.Joined(generation=4))
        for step in range(1, 6):
            core.say(plan=pb.StepPlan(generation=4, step=step))
        for step in range(1, 6):
            result = core.expect("result").result
            assert (result.generation, result.step) == (4, step)

    served.run(script)
    assert served.runner.joined == [4]
    core.expect("leave")


def test_idle_workers_say_they_are_alive(served: Served, core: Core) -> None:
    def script() -> None:
        core.expect("join")
        core.say(joined=pb.Joined(generation=1))
        for _ in range(2):
            assert core.expect("heartbeat").heartbeat.phase == "ready"

    served.run(script)


def test_a_core_that_comes_later_or_anew_is_joined(served: Served, endpoint: str) -> None:
    """No core at first; then one that is replaced by another, which does not know the worker."""

    def script() -> None:
        first = Core(endpoint)
        first.expect("join")
        first.say(joined=pb.Joined(generation=1))
        first.expect("heartbeat")
        first.socket.close()
        second = Core(endpoint)
        second.expect("heartbeat")
        second.say(rejoin=pb.Rejoin())
        second.expect("join")
        second.say(joined=pb.Joined(generation=7))
        second.say(plan=pb.StepPlan(generation=7, step=1))
        assert second.expect("result").result.generation == 7
        second.socket.close()

    served.run(script)
    assert served.runner.joined == [1, 7]


def test_refused_for_now_joins_again(served: Served, core: Core) -> None:
    def script() -> None:
        core.expect("join")
        core.say(refused=pb.Refused(reason="another worker serves", retry=True))
        core.expect("join")
        core.say(joined=pb.Joined(generation=1))

    served.run(script)


def test_refused_for_good_stops(served: Served, core: Core) -> None:
    def script() -> None:
        core.expect("join")
        core.say(refused=pb.Refused(reason="identity differs", retry=False))

    with pytest.raises(JoinRefused, match="identity differs"):
        # A signal could end the link before it reads the refusal.
        served.run(script, stop=False)


def test_frames_that_are_none_are_dropped(served: Served, core: Core) -> None:
    def script() -> None:
        core.expect("join")
        core.say(joined=pb.Joined(generation=1))
        for frame in (b"", b"\xff\xff\xff", b"\x0a\x7f", os.urandom(300)):
            core.socket.send_multipart([core.worker, frame])
        core.say(plan=pb.StepPlan(generation=1, step=1))
        assert core.expect("result").result.step == 1

    served.run(script)


def test_plans_before_joined_are_not_run(served: Served, core: Core) -> None:
    def script() -> None:
        core.expect("join")
        core.say(plan=pb.StepPlan(generation=1, step=1))
        core.say(joined=pb.Joined(generation=2))
        core.say(plan=pb.StepPlan(generation=2, step=1))
        assert core.expect("result").result.generation == 2

    served.run(script)
