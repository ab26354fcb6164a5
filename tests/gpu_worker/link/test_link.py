"""The link to the core: a real socket on each side, and a runner that answers at once instead of a device."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.link import link
from gpu_worker.link.connection import MAX_FRAME_BYTES
from gpu_worker.link.link import JoinRefused, Link, Reconnects, ready_line
from gpu_worker.wire.frames import MAX_JOIN_BYTES, Outcome
from tandem_contract.files import KEY_NAME, KeyFile
from tandem_contract.stopping import STOP

WAIT_MS = 10_000


class EchoRunner:
    """Answers each plan with its step number as the token."""

    def __init__(self) -> None:
        self.joined: list[int] = []
        self.outcomes: list[Outcome] = []
        self.constraints: Constraints | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self.outcomes)

    def report_pages(self, join: pb.Join) -> None:
        pass

    def join(self, message: pb.Joined) -> None:
        self.joined.append(message.generation)

    def submit(self, message: pb.StepPlan) -> None:
        tokens = np.array([message.step], np.int32)
        outcome = Outcome(generation=message.generation, step=message.step, status=pb.STEP_STATUS_OK, tokens=tokens)
        self.outcomes.append(outcome)

    def collect(self, *, wait: bool = True) -> Outcome | None:
        return self.outcomes.pop(0) if self.outcomes else None


class LateRunner(EchoRunner):
    """Answers a plan only when the test allows it, like a busy device."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def collect(self, *, wait: bool = True) -> Outcome | None:
        return super().collect() if self.may_answer.is_set() else None


class Core:
    """A ROUTER that sends messages for the test."""

    def __init__(self, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]] | None" = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.worker = b""
        # The routing id of each Join.
        self.joins: list[bytes] = []

    def expect(self, kind: str) -> pb.WorkerToCore:
        """The next message of a kind; heartbeats in between are skipped."""
        while True:
            assert self.socket.poll(WAIT_MS), f"no {kind}"
            self.worker, frame = self.socket.recv_multipart()
            message = pb.WorkerToCore()
            message.ParseFromString(frame)
            if message.HasField("join"):
                self.joins.append(self.worker)
            if message.WhichOneof("message") == kind:
                return message
            assert message.WhichOneof("message") in ("heartbeat", "stops" if kind == "leave" else "")

    def admit(self, generation: int, **more: str) -> pb.Join:
        """Answers the next Join with this generation."""
        join = self.expect("join").join
        self.say(joined=pb.Joined(generation=generation, **more))
        return join

    def compute(self, generation: int, step: int) -> None:
        """Sends a plan and takes its result, which is the next one."""
        self.say(plan=pb.StepPlan(generation=generation, step=step))
        result = self.expect("result").result
        assert (result.generation, result.step) == (generation, step)

    def say(self, **message: object) -> None:
        self.socket.send_multipart([self.worker, pb.CoreToWorker(**message).SerializeToString()])


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/worker.sock"


def serve(link: Link, script: Callable[[], None], *, stop: bool = True) -> None:
    """Serves on the main thread; `script` plays the core on another and then, to `stop` the link, sends a signal."""
    failures: list[BaseException] = []

    def play() -> None:
        try:
            script()
        except BaseException as error:
            failures.append(error)
        finally:
            if stop:
                os.kill(os.getpid(), signal.SIGTERM)

    player = threading.Thread(target=play)
    player.start()
    try:
        link.serve()
    finally:
        player.join()
    for failure in failures:
        raise failure


class Served:
    """A link that is served while a script plays the core."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.key = KeyFile(folder)
        self.runner = EchoRunner()
        self.standby = False

    def run(self, script: Callable[[], None], *, stop: bool = True) -> None:
        join = pb.Join(protocol=1, model="echo", standby=self.standby)
        serve(Link(self.endpoint, join, self.runner, key=self.key, max_in_flight=2), script, stop=stop)


@pytest.fixture
def served(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    # The signal at the end of a script is not answered.
    monkeypatch.setattr(link, "_SILENT_SECONDS", 0.0)
    return Served(endpoint, tmp_path)


@pytest.fixture
def core(endpoint: str) -> Iterator[Core]:
    core = Core(endpoint)
    yield core
    core.socket.close()


def test_a_session_has_join_plans_results_heartbeats_and_leave(served: Served, core: Core) -> None:
    def script() -> None:
        join = core.expect("join").join
        assert (join.model, join.max_frame_bytes) == ("echo", 64 << 20)
        assert core.worker.startswith(f"w-{os.getpid()}-".encode())
        # A plan before Joined is not run.
        core.say(plan=pb.StepPlan(generation=1, step=1))
        core.say(joined=pb.Joined(generation=4))
        for step in range(1, 6):
            core.say(plan=pb.StepPlan(generation=4, step=step))
        for step in range(1, 6):
            result = core.expect("result").result
            assert (result.generation, result.step) == (4, step)
        for _ in range(2):
            assert core.expect("heartbeat").heartbeat.phase == "ready"

    served.run(script)
    assert served.runner.joined == [4]
    core.expect("leave")


def test_a_worker_joins_a_scheduler_that_starts_later_and_every_restarted_one(served: Served, endpoint: str) -> None:
    def script() -> None:
        first = Core(endpoint)
        first.admit(1)
        first.expect("heartbeat")
        first.socket.close()
        second = Core(endpoint)
        second.expect("join")
        assert second.joins != first.joins
        second.say(joined=pb.Joined(generation=7))
        second.compute(7, 1)
        second.socket.close()

    served.run(script)
    assert served.runner.joined == [1, 7]


def test_the_worker_answers_rejoin_with_a_join_on_the_same_connection(
    served: Served, core: Core, tmp_path: Path
) -> None:
    """Every Join carries the present key."""
    key_file = tmp_path / KEY_NAME

    def script() -> None:
        first = core.admit(1).key
        assert first == key_file.read_bytes()
        assert (len(first), key_file.stat().st_mode & 0o777) == (32, 0o600)
        key_file.write_bytes(b"n" * 32)
        core.say(rejoin=pb.Rejoin())
        assert core.admit(2).key == b"n" * 32
        core.compute(2, 1)

    served.run(script)
    assert len(core.joins) == 2
    assert len(set(core.joins)) == 1
    assert served.runner.joined == [1, 2]


def test_a_frame_above_the_limit_leads_to_a_new_connection_that_serves(served: Served, core: Core) -> None:
    """libzmq ends such a connection for good, so a new socket must join each time."""

    def script() -> None:
        core.expect("join")
        for generation in (1, 2, 3):
            core.say(joined=pb.Joined(generation=generation))
            core.compute(generation, 1)
            if generation < 3:
                core.socket.send_multipart([core.worker, bytes(MAX_FRAME_BYTES + 1)])
                core.expect("join")

    served.run(script)
    assert len(core.joins) == 3
    assert len(set(core.joins)) == 3
    assert served.runner.joined == [1, 2, 3]


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lowers the frame limit, so that exceeding it needs little memory."""
    monkeypatch.setattr("gpu_worker.link.connection.MAX_FRAME_BYTES", 1 << 16)
    return 1 << 16


def test_repeated_disconnects_are_retried_with_few_log_lines(
    served: Served, core: Core, small_frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each Join is answered with a frame above the limit, five times."""

    def script() -> None:
        for _ in range(5):
            core.expect("join")
            core.socket.send_multipart([core.worker, bytes(small_frames + 1)])
        core.expect("join")

    with caplog.at_level(logging.INFO, "gpu_worker"):
        served.run(script)
    assert len(set(core.joins)) == 6
    lines = [record.getMessage() for record in caplog.records if "the connection to the scheduler" in record.message]
    assert [line.partition("ended")[2].split(";")[0] for line in lines] == [
        "",
        " 2 times before a step succeeded",
        " 4 times before a step succeeded",
    ]


def test_pauses_grow_until_a_step_succeeds() -> None:
    reconnects = Reconnects("ipc:///run/worker.sock")
    pauses = [reconnects.ended("") for _ in range(12)]
    assert pauses[0] == 0.0 and pauses == sorted(pauses) and pauses[-1] == pauses[-2] == 2.0
    reconnects.step_succeeded()
    assert reconnects.ended("") == 0.0


def test_a_frame_at_the_size_limit_is_accepted(served: Served, core: Core) -> None:
    def script() -> None:
        core.admit(1)
        # Its bytes are not a message, so it is counted as bad and dropped.
        core.socket.send_multipart([core.worker, b"\xff" * MAX_FRAME_BYTES])
        core.compute(1, 1)

    served.run(script)
    assert len(core.joins) == 1


def test_plans_of_a_broken_connection_are_not_answered_on_the_next(
    served: Served, core: Core, small_frames: int
) -> None:
    runner = LateRunner()
    served.runner = runner
    results: list[tuple[int, int]] = []

    def script() -> None:
        core.admit(1)
        for step in (1, 2):
            core.say(plan=pb.StepPlan(generation=1, step=step))
        while runner.num_in_flight < 2:
            core.expect("heartbeat")
        core.socket.send_multipart([core.worker, bytes(small_frames + 1)])
        core.admit(2)
        core.say(plan=pb.StepPlan(generation=2, step=1))
        runner.may_answer.set()
        result = core.expect("result").result
        results.append((result.generation, result.step))

    served.run(script)
    assert results == [(2, 1)]
    assert runner.outcomes == []


def test_the_worker_joins_again_if_a_refused_key_was_replaced(served: Served, core: Core, tmp_path: Path) -> None:
    """And if it is refused for now; else the refusal ends it."""

    def script() -> None:
        core.expect("join")
        core.say(refused=pb.Refused(reason="another worker serves", retry=True))
        core.expect("join")
        (tmp_path / KEY_NAME).write_bytes(b"n" * 32)
        core.say(refused=pb.Refused(reason="another key", retry=False))
        assert core.expect("join").join.key == b"n" * 32
        core.say(refused=pb.Refused(reason="identity differs", retry=False))

    with pytest.raises(JoinRefused, match="identity differs"):
        # A signal could end the link before it reads the refusal.
        served.run(script, stop=False)


def test_the_first_confirmed_step_announces_a_command_to_paste(
    served: Served, core: Core, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("ready: ")]

    def script() -> None:
        core.admit(1, listen="127.0.0.1:50366")
        core.expect("heartbeat")
        assert ready() == []
        for step in (1, 2):
            core.compute(1, step)

    monkeypatch.setattr(logging.getLogger("gpu_worker"), "level", logging.ERROR)
    served.run(script)
    assert ready() == ['ready: tandem generate --address 127.0.0.1:50366 "Return the"']


def test_the_command_to_paste_omits_the_default_address() -> None:
    assert ready_line("127.0.0.1:50051") == 'ready: tandem generate "Return the"'
    assert ready_line("[::1]:50051") == 'ready: tandem generate --address [::1]:50051 "Return the"'


def test_a_join_that_is_too_large_is_refused_before_sending(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_JOIN_BYTES == 128 << 20
    monkeypatch.setattr("gpu_worker.wire.frames.MAX_JOIN_BYTES", 1000)
    join = pb.Join(model="echo", tokenizer_json=bytes(1000))
    sizes = r"Join has 10\d\d bytes \(tokenizer 1000, chat template 0, other files of chats 0\)"
    problem = f"{sizes}, but the scheduler accepts at most 1000"
    with pytest.raises(ValueError, match=problem):
        Link(endpoint, join, EchoRunner(), key=KeyFile(tmp_path), max_in_flight=2)


def test_frames_that_are_not_messages_are_dropped_and_counted(
    served: Served, core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> None:
        core.admit(1)
        for frame in (b"", *(b"\xff" * size for size in range(1, 10))):
            core.socket.send_multipart([core.worker, frame])
        core.compute(1, 1)

    served.run(script)
    # One line each time the count has doubled.
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("dropped ")]
    assert [line.split()[1] for line in lines] == ["1", "2", "4", "8"]


def test_a_standby_worker_says_so_until_it_is_seated(
    served: Served, core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it serves, and joins again as a worker that serves."""

    def said() -> list[str]:
        return [line for record in caplog.records if "ready" in (line := record.getMessage())]

    def script() -> None:
        assert core.admit(1, listen="127.0.0.1:50366").standby
        core.compute(1, 1)
        core.expect("heartbeat")
        assert said() == ["on standby: ready to take over"]
        core.say(rejoin=pb.Rejoin())
        assert core.admit(2, listen="127.0.0.1:50366").standby
        core.say(seated=pb.Seated())
        core.compute(2, 1)
        core.say(rejoin=pb.Rejoin())
        assert not core.expect("join").join.standby

    served.standby = True
    with caplog.at_level(logging.INFO, "gpu_worker"):
        served.run(script)
    assert said()[1:] == ['ready: tandem generate --address 127.0.0.1:50366 "Return the"']


def test_a_dismissed_worker_leaves_without_a_signal(core: Core, served: Served) -> None:
    def script() -> None:
        core.admit(1)
        core.say(dismissed=pb.Dismissed())
        core.expect("leave")

    served.run(script, stop=False)


def test_a_worker_that_was_asked_to_stop_computes_until_it_is_dismissed(
    core: Core, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_SILENT_SECONDS", 3600.0)

    def script() -> None:
        core.admit(1)
        # Its result says that the worker has heard of both.
        core.compute(1, 1)
        os.kill(os.getpid(), STOP)
        core.expect("stops")
        # The service stops too, and its rows need this worker. The parent's word may come again.
        os.kill(os.getpid(), STOP)
        core.compute(1, 2)
        core.say(dismissed=pb.Dismissed())
        core.expect("leave")

    served.run(script, stop=False)


@pytest.mark.parametrize("how", ["lost", "silent", "unknown"])
def test_a_worker_that_was_asked_to_stop_does_not_wait_for_a_scheduler(
    core: Core, served: Served, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its scheduler ends, says nothing more, or has not accepted it yet."""
    monkeypatch.setattr(link, "_SILENT_SECONDS", 0.3 if how == "silent" else 3600.0)

    def script() -> None:
        core.expect("join")
        if how == "unknown":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        core.say(joined=pb.Joined(generation=1))
        core.compute(1, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        core.expect("stops")
        if how == "lost":
            core.socket.close()
        else:
            core.expect("leave")

    served.run(script, stop=False)


def test_a_signal_is_heard_from_the_line_on_that_says_the_worker_waits(
    served: Served, core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it, a signal ends the process by its default."""
    is_said = threading.Event()

    class Impatient(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for a scheduler" in record.getMessage() and not is_said.is_set():
                is_said.set()
                assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end this process"
                os.kill(os.getpid(), signal.SIGTERM)

    def script() -> None:
        if not is_said.wait(WAIT_MS / 1e3):
            os.kill(os.getpid(), signal.SIGTERM)

    handler = Impatient()
    link.log.addHandler(handler)
    caplog.set_level(logging.INFO, link.log.name)
    try:
        served.run(script, stop=False)
    finally:
        link.log.removeHandler(handler)
    assert is_said.is_set()


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_second_signal_from_outside_ends_the_process_at_once(is_busy: bool) -> None:
    """Also while its main thread is in a call that takes long."""
    code = f"""
import hashlib, os, signal, threading, time
from gpu_worker.link.connection import signals_wake
from tandem_contract.stopping import STOP
heard = threading.Event()
with signals_wake(lambda: (print("stops", flush=True), heard.set())):
    for number in (STOP, STOP, signal.SIGTERM):
        os.kill(os.getpid(), number)
    heard.wait()
    time.sleep(0.1)
    os.kill(os.getpid(), STOP)
    time.sleep(0.1)
    print("still there", flush=True)
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    if {is_busy}:
        # Minutes in C, where no handler of Python's runs.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "stops\nstill there\n")


class FakeConstraints:
    """Answers a constraint some turns after it was prepared, as the mask server does."""

    def __init__(self) -> None:
        self.prepared: list[bytes] = []
        self.dropped: list[bytes] = []
        self.num_turns = 0

    @property
    def is_preparing(self) -> bool:
        return self.num_turns > 0

    def prepare(self, hash_: bytes, source: bytes) -> None:
        self.prepared.append(source)
        self.hash, self.num_turns = hash_, 20

    def drop(self, hash_: bytes) -> None:
        self.dropped.append(hash_)

    def answers(self) -> list[tuple[bytes, str]]:
        self.num_turns = max(0, self.num_turns - 1)
        is_due = self.num_turns == 0 and len(self.prepared) == 1
        self.prepared += [b"answered"] * is_due
        return [(self.hash, "llguidance does not like it")] if is_due else []


def test_the_answer_to_a_constraint_comes_when_it_is_ready_and_plans_go_on(served: Served, core: Core) -> None:
    constraints = served.runner.constraints = FakeConstraints()  # type: ignore[assignment]

    def script() -> None:
        core.expect("join")
        core.say(prepare_constraint=pb.PrepareConstraint(hash=b"x" * 32, source=b"before Joined"))
        core.say(joined=pb.Joined(generation=1))
        core.say(prepare_constraint=pb.PrepareConstraint(hash=b"h" * 32, source=b"start: /a/"))
        core.compute(1, 1)
        ready = core.expect("constraint_ready").constraint_ready
        assert (ready.hash, ready.error) == (b"h" * 32, "llguidance does not like it")
        core.say(drop_constraint=pb.DropConstraint(hash=b"h" * 32))
        core.compute(1, 2)

    served.run(script)
    assert constraints.prepared == [b"start: /a/", b"answered"] and constraints.dropped == [b"h" * 32]


def test_a_worker_without_constraints_says_so_at_once(served: Served, core: Core) -> None:
    def script() -> None:
        core.admit(1)
        core.say(prepare_constraint=pb.PrepareConstraint(hash=b"h" * 32, source=b"start: /a/"))
        core.say(drop_constraint=pb.DropConstraint(hash=b"h" * 32))
        assert "no constraints" in core.expect("constraint_ready").constraint_ready.error

    served.run(script)
