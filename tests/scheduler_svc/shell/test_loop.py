"""The loop on real sockets: what comes in one turn, what comes at the end, what strangers send."""

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import control_pb2

from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.recording import event_log
from scheduler_svc.recording.event_log import Recorder
from scheduler_svc.shell.loop import Loop
from scheduler_svc.shell.peers import Credentials
from scheduler_svc.shell.router_link import FrameTooLargeError, RouterLink
from scheduler_svc.shell.served_model import ModelCard
from tests.scheduler_svc.wire.test_worker import JOIN

KEY, SECRET = b"k" * 32, b"s" * 32


class NoChild:
    """Stands for the front ends' processes: runs until it is asked to stop."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.may_end = threading.Event()
        self.asked = threading.Event()

    def watch(self, *, restart: bool) -> None:
        pass

    def give_up(self, frontend: str) -> None:
        self.given_up.append(frontend)

    def ask_to_stop(self) -> None:
        self.asked.set()

    @property
    def listen(self) -> str:
        return "127.0.0.1:4711"

    @property
    def is_running(self) -> bool:
        return not self.may_end.is_set()


class Peer:
    """A DEALER with a name."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def send(self, *messages: worker_pb2.WorkerToCore | frontend_pb2.FrontendToCore | bytes) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else message.SerializeToString())

    def receive(self) -> bytes:
        while True:
            assert self.socket.poll(10_000), "nothing came"
            frame = self.socket.recv()
            if frame:
                return frame

    def heard(self) -> worker_pb2.CoreToWorker:
        return worker_pb2.CoreToWorker.FromString(self.receive())

    def told(self) -> frontend_pb2.CoreToFrontend:
        """The next message that is not the core's status, which comes whenever a worker joins or leaves."""
        while (message := frontend_pb2.CoreToFrontend.FromString(self.receive())).HasField("core_status"):
            pass
        return message


class Bench:
    """A loop in a thread, started when the test says so: what was sent before comes in its first turn."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoints = [f"ipc://{folder}/w", f"ipc://{folder}/f"]
        self.links = [RouterLink(self.context, at, max_frame_bytes=1 << 20) for at in self.endpoints]
        self.child, self.stops = NoChild(), 0
        self.wake, self.woken = socket.socketpair()
        self.core = Scheduler(CoreConfig())
        self.recorder: Recorder | None = None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.peers: list[Peer] = []

    def _run(self) -> None:
        loop = Loop(
            core=self.core,
            workers=self.links[0],
            frontends=self.links[1],
            card=ModelCard(default_max_new_tokens=8, max_waiting=8, cache_root=bytes(32)),
            children=self.child,
            credentials=Credentials(worker_key=KEY, key_path=Path("/run/worker.key"), frontend_secret=SECRET),
            watch=lambda: None,
            recorder=self.recorder,
            steps=None,
            grace_seconds=5.0,
            wake=self.wake,
        )
        try:
            loop.run(lambda: self.stops)
        except BaseException as failure:
            self.failure = failure

    def worker(self, name: str = "w-1") -> Peer:
        self.peers.append(Peer(self.context, self.endpoints[0], name))
        return self.peers[-1]

    def frontend(self, name: str = "f-1") -> Peer:
        self.peers.append(Peer(self.context, self.endpoints[1], name))
        return self.peers[-1]

    def await_frames(self, num_peers: int) -> None:
        """Frames are in the links' queues: a link is readable once a peer's first frame is."""
        for link in self.links[:num_peers]:
            assert link.socket.poll(10_000)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.stops += 1
        self.woken.send(b"x")

    def close(self) -> None:
        self.child.may_end.set()
        if self.thread.ident is not None:
            self.stop()
            self.stop()
            self.thread.join(10)
            assert not self.thread.is_alive()
        for peer in self.peers:
            peer.socket.close(0)
        for link in self.links:
            link.close()
        if self.recorder is not None:
            self.recorder.close()
        self.context.term()
        self.wake.close()
        self.woken.close()
        assert self.failure is None, self.failure


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def joining(**changes: object) -> worker_pb2.WorkerToCore:
    join = worker_pb2.Join.FromString(JOIN.SerializeToString())
    join.key = KEY
    for name, value in changes.items():
        setattr(join, name, value)
    return worker_pb2.WorkerToCore(join=join)


HELLO = frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=SECRET))
LEAVE = worker_pb2.WorkerToCore(leave=worker_pb2.Leave())


def submit(stream: int) -> frontend_pb2.FrontendToCore:
    return frontend_pb2.FrontendToCore(
        submit=frontend_pb2.Submit(
            stream=stream,
            num_samples=1,
            repetition_penalty=1.0,
            request_id=f"r{stream}",
            prompt=b"\1\0\0\0",
            max_new_tokens=3,
            top_p=1.0,
        )
    )


def test_two_joins_in_one_turn_are_both_answered(bench: Bench) -> None:
    worker = bench.worker()
    worker.send(joining(), joining())
    bench.await_frames(1)
    bench.start()
    assert [worker.heard().joined.generation for _ in range(2)] == [1, 3]


def test_a_join_and_rubbish_in_one_turn(bench: Bench) -> None:
    worker = bench.worker()
    worker.send(joining(), b"\xff\xff")
    bench.await_frames(1)
    bench.start()
    assert worker.heard().HasField("joined")
    assert not worker.heard().refused.retry


def test_join_leave_join_in_one_turn(bench: Bench) -> None:
    worker = bench.worker()
    worker.send(joining(), LEAVE, joining())
    bench.await_frames(1)
    bench.start()
    assert [worker.heard().WhichOneof("message") for _ in range(2)] == ["joined", "joined"]


def test_a_worker_is_answered_in_the_order_of_what_it_sent(bench: Bench) -> None:
    """A sign of life of one that is not known, its Join behind it: after Joined, a Rejoin would undo it."""
    worker = bench.worker()
    heartbeat = worker_pb2.WorkerToCore(heartbeat=worker_pb2.Heartbeat(phase="ready"))
    void = worker_pb2.StepResult(generation=9, step=1, status=worker_pb2.STEP_STATUS_OK)
    worker.send(heartbeat, worker_pb2.WorkerToCore(result=void), joining())
    bench.await_frames(1)
    bench.start()
    assert [worker.heard().WhichOneof("message") for _ in range(3)] == ["rejoin", "rejoin", "joined"]


def test_front_ends_are_told_of_the_model_that_is_served(bench: Bench) -> None:
    worker, frontend = bench.worker(), bench.frontend()
    worker.send(joining(), joining(identity="other", model="other"))
    frontend.send(HELLO)
    bench.await_frames(2)
    bench.start()
    assert frontend.told().model_state.info.model == "m"
    assert worker.heard().HasField("joined")
    assert "identity" in worker.heard().refused.reason


def test_a_larger_worker_is_told_to_front_ends_an_equal_one_is_not(bench: Bench) -> None:
    worker, frontend = bench.worker(), bench.frontend()
    worker.send(joining())
    bench.start()
    assert worker.heard().HasField("joined")
    frontend.send(HELLO)
    assert frontend.told().model_state.info.max_rows == 3
    worker.send(joining(pid=7))
    assert worker.heard().HasField("joined")
    worker.send(joining(max_rows=4))
    assert worker.heard().HasField("joined")
    assert frontend.told().model_state.info.max_rows == 4


def load_of(frontend: Peer, query: int) -> control_pb2.GetLoadResponse:
    frontend.send(frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=query)))
    reply = frontend.told().load_reply
    assert reply.query == query
    return reply.load


def test_two_workers_serve_and_one_that_dies_is_found_out(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second, frontend = bench.worker("w-1"), bench.worker("w-2"), bench.frontend()
    first.send(joining(pid=11))
    bench.start()
    assert first.heard().HasField("joined")
    frontend.send(HELLO)
    assert frontend.told().model_state.ready
    second.send(joining(pid=22))
    assert second.heard().HasField("joined")
    # The model is the same, so front ends are told nothing: the next that comes is the answer.
    assert [worker.pid for worker in load_of(frontend, 1).per_worker] == [11, 22]
    first.socket.close(0)
    query = 2
    while len(workers := load_of(frontend, query).per_worker) == 2:
        query += 1
    assert [worker.pid for worker in workers] == [22]
    said = [line for line in caplog.messages if line.startswith("worker w-")]
    assert [line.split(" ")[1:3] for line in said] == [["w-1", "joined"], ["w-2", "joined"], ["w-1", "lost:"]]


def test_a_flush_is_answered(bench: Bench) -> None:
    frontend = bench.frontend()
    frontend.send(HELLO, frontend_pb2.FrontendToCore(flush_cache=frontend_pb2.FlushCache(query=3)))
    bench.start()
    assert frontend.told().HasField("model_state")
    reply = frontend.told().flush_reply
    assert (reply.query, reply.pages) == (3, 0)


def test_a_tokenizer_reaches_front_ends_whole(bench: Bench) -> None:
    worker, frontend = bench.worker(), bench.frontend()
    worker.send(joining(tokenizer_json=b"{}", chat_template="t"))
    bench.start()
    assert worker.heard().HasField("joined")
    frontend.send(HELLO)
    state = frontend.told().model_state
    assert (state.tokenizer_json, state.chat_template) == (b"{}", "t")


def test_an_end_token_outside_the_vocabulary_refuses_the_worker_for_good(bench: Bench) -> None:
    worker = bench.worker()
    join = joining()
    join.join.eos_token_ids.append(2**32 - 1)
    worker.send(join)
    bench.start()
    refused = worker.heard().refused
    assert (refused.retry, "4294967295" in refused.reason) == (False, True)


def test_whoever_comes_while_the_service_stops_is_answered(bench: Bench) -> None:
    frontend, worker = bench.frontend(), bench.worker()
    worker.send(joining())
    bench.start()
    assert worker.heard().HasField("joined")
    frontend.send(HELLO)
    assert frontend.told().HasField("model_state")
    bench.stop()
    assert frontend.told().HasField("draining")
    assert bench.child.asked.wait(10)
    frontend.send(submit(1))
    rejected = frontend.told().rejected
    assert (rejected.stream, rejected.code) == (1, frontend_pb2.REJECT_CODE_NOT_READY)
    bench.child.may_end.set()
    bench.thread.join(10)
    assert not bench.thread.is_alive()


def test_a_malformed_submit_is_answered(bench: Bench) -> None:
    frontend = bench.frontend()
    frontend.send(HELLO)
    bad = submit(5)
    bad.submit.prompt = b"123"
    frontend.send(bad)
    bench.start()
    assert frontend.told().HasField("model_state")
    rejected = frontend.told().rejected
    assert (rejected.stream, rejected.code) == (5, frontend_pb2.REJECT_CODE_INVALID)
    assert "prompt has 3 bytes" in rejected.message


def test_a_stranger_without_the_secret_neither_submits_nor_harms_the_true_front_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = bench.frontend("f-77-0a")
    frontend.send(HELLO)
    bench.start()
    assert frontend.told().HasField("model_state")
    # One under the true one's identity, one under a name with its process id, as when its end kills that process.
    for name in ("f-77-0a", "f-77-0b\x1b[2J"):
        stranger = bench.frontend(name)
        for secret in (b"", b"x" * 32):
            stranger.send(frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=secret)))
        stranger.send(submit(1), frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=1)), b"\xff")
    while not [line for line in caplog.messages if line.startswith("front end f-77-0b")]:
        assert load_of(frontend, 2).waiting == 0
    # Its other frames came with that one; none was answered.
    load_of(frontend, 3)
    assert not bench.peers[-1].socket.poll(0)
    for stranger in bench.peers[1:]:
        stranger.socket.close(0)
    frontend.send(submit(7))
    # Refused because no worker is there, which only a front end that is known is answered.
    assert frontend.told().rejected.stream == 7
    assert list(bench.core.frontends) == ["f-77-0a"]
    assert bench.child.given_up == []
    # One line for all of the stranger's frames.
    assert len(caplog.messages) == 1


def test_a_worker_without_the_key_is_refused_and_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    bench.recorder = Recorder(log, CoreConfig())
    stray, worker, frontend = bench.worker("w-1"), bench.worker("w-2"), bench.frontend()
    stray.send(joining(key=b"", model="stray", identity="stray"))
    bench.start()
    refused = stray.heard().refused
    assert not refused.retry
    assert "its key is not the one in /run/worker.key" in refused.reason
    stray.send(joining(key=b"x" * 32, model="stray", identity="stray"))
    worker.send(joining())
    joined = worker.heard().joined
    assert (joined.generation, joined.listen) == (1, "127.0.0.1:4711")
    frontend.send(HELLO)
    assert frontend.told().model_state.info.model == "m"
    bench.recorder.flush()
    events = list(event_log.read(log)[1])
    assert [entry.peer for entry in events if entry.HasField("worker")] == ["w-2"]
    assert not [secret for secret in (KEY, SECRET, b"x" * 32) if secret in log.read_bytes()]


def test_a_flood_of_bad_frames_is_answered_and_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stray, frontend = bench.worker(), bench.frontend()
    frontend.send(HELLO)
    bench.start()
    assert frontend.told().HasField("model_state")
    for _ in range(5000):
        stray.send(b"\xff\xff")
    stray.socket.send_multipart([b"in", b"parts"])
    stray.send(joining())
    heard = [stray.heard().WhichOneof("message") for _ in range(2)]
    assert heard == ["refused", "joined"]
    assert len([line for line in caplog.messages if "w-1" in line and "dropped" in line]) <= 2


def test_a_worker_that_cannot_take_a_frame_is_lost_with_the_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker, frontend = bench.worker(), bench.frontend()
    worker.send(joining(max_frame_bytes=17 << 20))
    bench.start()
    assert worker.heard().HasField("joined")
    frontend.send(HELLO)
    assert frontend.told().model_state.ready
    with pytest.raises(FrameTooLargeError, match="it takes at most 17,825,792"):
        bench.links[0].send("w-1", bytes((17 << 20) + 1))
    # As if it had joined with this limit; the core refuses workers whose plans would not fit.
    bench.links[0].limit_frames("w-1", 10)
    frontend.send(submit(1))
    assert frontend.told().HasField("admitted")
    while "worker w-1 lost: a frame for it has" not in " ".join(caplog.messages):
        assert load_of(frontend, 1).waiting <= 1
    assert bench.core.lanes == {}


def test_the_first_served_model_is_announced_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tandem")
    caplog.handler.setLevel(logging.NOTSET)
    frontends = [bench.frontend(f"f-{number}") for number in range(2)]
    worker = bench.worker()
    worker.send(joining())
    bench.start()
    assert worker.heard().HasField("joined")
    for frontend in frontends:
        frontend.send(HELLO)
        assert frontend.told().model_state.ready
    ready = [line for line in caplog.messages if line.startswith("ready: ")]
    assert ready == ['ready: tandem generate --address 127.0.0.1:4711 "Return the"']


def test_a_connection_that_ends_floods_nobody_with_probes(bench: Bench) -> None:
    """Many turns within the second of probing: a peer that reads slowly must not be lost to them."""
    worker, slow, busy = bench.worker(), bench.frontend("f-1"), bench.frontend("f-2")
    worker.send(joining())
    bench.start()
    assert worker.heard().HasField("joined")
    for frontend in (slow, busy):
        frontend.send(HELLO)
        assert frontend.told().HasField("model_state")
    gone = bench.frontend("f-3")
    gone.send(HELLO)
    assert gone.told().HasField("model_state")
    gone.socket.close(0)
    for query in range(3000):
        busy.send(frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=query)))
        assert busy.told().load_reply.query == query
    probes = 0
    while slow.socket.poll(0):
        probes += slow.socket.recv() == b""
    assert 0 < probes <= 250
    assert "f-1" in bench.core.frontends
    assert bench.core.lanes
    assert bench.child.given_up == ["f-3"]
