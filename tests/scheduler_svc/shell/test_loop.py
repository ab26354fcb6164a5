"""The loop on real sockets: several messages in one turn, the stop, and frames of unknown peers."""

import logging
import queue
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from tandem.internal.v1 import frontend_pb2, journal_pb2, worker_pb2
from tandem.v1 import control_pb2

from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.journal.file import FORMAT, Sync
from scheduler_svc.journal.keeper import JournalKeeper, OpenedJournal
from scheduler_svc.metrics.catalogue import NUM_CELLS
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.metrics.front_meter import FrontMeter
from scheduler_svc.processes.workers import WorkerProcesses
from scheduler_svc.recording import event_log
from scheduler_svc.recording.event_log import Recorder
from scheduler_svc.shell import loop
from scheduler_svc.shell.dispatch import ServedModel
from scheduler_svc.shell.inbound import Credentials
from scheduler_svc.shell.links import PeerLostError, RouterLink
from scheduler_svc.shell.loop import Loop
from scheduler_svc.wire.framing import Frames
from tandem_contract.stopping import STOP_NOW, StopRequests
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.wire.test_worker import a_join

KEY, SECRET = b"k" * 32, b"s" * 32


class FakeChildren:
    """Stands for the processes of the front ends: runs until the test lets it end."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.may_end = threading.Event()
        self.asked = threading.Event()
        self.watched = threading.Event()

    def watch(self, *, restart: bool) -> None:
        self.watched.set()

    def kill(self, frontend: str) -> None:
        self.killed.append(frontend)

    def ask_to_stop(self) -> None:
        self.asked.set()

    @property
    def listen(self) -> str:
        return "127.0.0.1:4711"

    @property
    def is_running(self) -> bool:
        return not self.may_end.is_set()


class Peer:
    """A worker or front end: a DEALER with an identity."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.endpoint, self.num_sent = endpoint, 0
        self._batch: list[frontend_pb2.CoreToFrontend] = []

    def send(self, *messages: worker_pb2.WorkerToCore | frontend_pb2.FrontendToCore | bytes) -> None:
        for message in messages:
            self.num_sent += 1
            self.socket.send(message if isinstance(message, bytes) else message.SerializeToString())

    def receive(self) -> bytes:
        while True:
            assert self.socket.poll(1000 * TIMEOUT_SECONDS), "no frame arrived"
            frame = self.socket.recv()
            if frame:
                return frame

    def next_of_worker(self) -> worker_pb2.CoreToWorker:
        return worker_pb2.CoreToWorker.FromString(self.receive())

    def next_of_frontend(self) -> frontend_pb2.CoreToFrontend:
        """The next message that is not a core status, which is sent whenever a worker joins or leaves."""
        while (message := self._next_message()).HasField("core_status"):
            pass
        return message

    def _next_message(self) -> frontend_pb2.CoreToFrontend:
        """The next message, alone in its frame or one of a batch."""
        if not self._batch:
            message = frontend_pb2.CoreToFrontend.FromString(self.receive())
            self._batch = list(message.batch.messages) if message.HasField("batch") else [message]
        return self._batch.pop(0)


class Bench:
    """A loop in a thread. Frames that are sent before `start` arrive in its first turn."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoints = [f"ipc://{folder}/w", f"ipc://{folder}/f"]
        self.links = [RouterLink(self.context, at, max_frame_bytes=1 << 20) for at in self.endpoints]
        self.child, self.stops = FakeChildren(), StopRequests()
        self.wake, self.woken = socket.socketpair()
        self.core = Scheduler(CoreConfig())
        self.recorder: Recorder | None = None
        self.journal: JournalKeeper | None = None
        self.metrics: CoreMeter | None = None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.peers: list[Peer] = []

    def _run(self) -> None:
        loop = Loop(
            core=self.core, workers=(self.links[0],), frontends=self.links[1], worker_processes=WorkerProcesses(None),
            served_model=ServedModel(default_max_new_tokens=8, max_waiting=8, cache_root=bytes(32)),
            children=self.child, watch=lambda: None, tokens=None, grace_seconds=5.0, wake=self.wake,
            credentials=Credentials(worker_key=KEY, key_path=Path("/run/worker.key"), frontend_secret=SECRET),
            observers=[] if self.recorder is None else [self.recorder], journal=self.journal, metrics=self.metrics,
        )  # fmt: skip
        try:
            loop.run(self.stops)
        except BaseException as failure:
            self.failure = failure

    def peer(self, at: int, name: str) -> Peer:
        self.peers.append(Peer(self.context, self.endpoints[at], name))
        return self.peers[-1]

    def worker(self, name: str = "w-1") -> Peer:
        return self.peer(0, name)

    def frontend(self, name: str = "f-1") -> Peer:
        return self.peer(1, name)

    def joined(self, name: str = "w-1", **changes: object) -> Peer:
        """A worker that has joined the loop, which runs from now on."""
        worker = self.worker(name)
        worker.send(joining(**changes))
        if self.thread.ident is None:
            self.start()
        assert worker.next_of_worker().HasField("joined")
        return worker

    def greeted(self, name: str = "f-1") -> tuple[Peer, frontend_pb2.ModelState]:
        """A front end that has got the model from the loop, which runs."""
        frontend = self.frontend(name)
        frontend.send(HELLO)
        return frontend, frontend.next_of_frontend().model_state

    def start(self) -> None:
        for link, endpoint in zip(self.links, self.endpoints, strict=True):
            self._await_frames(link, sum(peer.num_sent for peer in self.peers if peer.endpoint == endpoint))
        self.thread.start()

    @staticmethod
    def _await_frames(link: RouterLink, count: int) -> None:
        """Has the first turn wait for so many frames."""
        received = link.receive

        def receive(limit: int) -> Iterator[tuple[str, bytes | None]]:
            link.receive = received
            frames: list[tuple[str, bytes | None]] = []
            while len(frames) < count:
                assert link.socket.poll(1000 * TIMEOUT_SECONDS)
                frames += received(limit)
            return iter(frames)

        link.receive = receive

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.stops.heard(number)
        self.woken.send(b"x")

    def end(self) -> None:
        """Stops the loop at once."""
        self.child.may_end.set()
        self.stop(STOP_NOW)
        self.thread.join(TIMEOUT_SECONDS)
        assert not self.thread.is_alive()

    def close(self) -> None:
        if self.thread.ident is not None:
            self.end()
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
    return worker_pb2.WorkerToCore(join=a_join(**{"key": KEY} | changes))


HELLO = frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=SECRET))
LEAVE = worker_pb2.WorkerToCore(leave=worker_pb2.Leave())


def submit(stream: int) -> frontend_pb2.FrontendToCore:
    wanted = {"request_id": f"r{stream}", "prompt": b"\1\0\0\0", "max_new_tokens": 3, "num_samples": 1}
    return frontend_pb2.FrontendToCore(submit=frontend_pb2.Submit(stream=stream, **wanted))  # type: ignore[arg-type]


HEARTBEAT = worker_pb2.WorkerToCore(heartbeat=worker_pb2.Heartbeat(phase="ready"))
STALE = worker_pb2.WorkerToCore(result=worker_pb2.StepResult(generation=9, step=1, status=worker_pb2.STEP_STATUS_OK))


@pytest.mark.parametrize(
    ("messages", "answers", "generations"),
    [
        ([joining(), joining()], ["joined", "joined"], [1, 3]),
        ([joining(), b"\xff\xff"], ["joined", "refused"], [1]),
        ([joining(), LEAVE, joining()], ["joined", "joined"], [1, 3]),
        # A heartbeat of an unknown worker comes before its Join: a Rejoin sent after Joined would undo the Join.
        ([HEARTBEAT, STALE, joining()], ["rejoin", "rejoin", "joined"], [1]),
    ],
    ids=["two joins", "a malformed frame", "a leave", "an unknown worker"],
)
def test_messages_of_a_worker_in_one_turn_are_answered_in_their_order(
    bench: Bench, messages: list[worker_pb2.WorkerToCore | bytes], answers: list[str], generations: list[int]
) -> None:
    worker = bench.worker()
    worker.send(*messages)
    bench.start()
    found = [worker.next_of_worker() for _ in answers]
    assert [answer.WhichOneof("message") for answer in found] == answers
    assert [answer.joined.generation for answer in found if answer.HasField("joined")] == generations
    assert not any(answer.refused.retry for answer in found)


def test_front_ends_receive_the_served_model(bench: Bench) -> None:
    worker, frontend = bench.worker(), bench.frontend()
    worker.send(joining(), joining(identity="other", model="other"))
    frontend.send(HELLO)
    bench.start()
    assert frontend.next_of_frontend().model_state.info.model == "m"
    assert worker.next_of_worker().HasField("joined")
    assert "identity" in worker.next_of_worker().refused.reason


def test_a_front_end_gets_one_frame_per_turn(bench: Bench) -> None:
    """Everything that one turn has for it, in order: the model, the state of the core, and a reply to each query."""
    worker, frontend, other = bench.worker(), bench.frontend(), bench.frontend("f-2")
    worker.send(joining())
    queries = [frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=query)) for query in (5, 6)]
    frontend.send(HELLO, *queries)
    other.send(HELLO)
    bench.start()
    assert worker.next_of_worker().HasField("joined")
    frames = [frontend_pb2.CoreToFrontend.FromString(peer.receive()) for peer in (frontend, other)]
    kinds = [[message.WhichOneof("message") for message in frame.batch.messages] for frame in frames]
    assert sorted(kinds[0]) == ["core_status", "load_reply", "load_reply", "model_state"]
    assert sorted(kinds[1]) == ["core_status", "model_state"]
    assert [one.load_reply.query for one in frames[0].batch.messages if one.HasField("load_reply")] == [5, 6]
    assert not frontend.socket.poll(0)


def test_front_ends_receive_the_model_again_after_a_larger_worker_joins(bench: Bench) -> None:
    worker = bench.joined()
    frontend, state = bench.greeted()
    assert state.info.max_rows == 3
    worker.send(joining(pid=7))
    assert worker.next_of_worker().HasField("joined")
    worker.send(joining(max_rows=4))
    assert worker.next_of_worker().HasField("joined")
    assert frontend.next_of_frontend().model_state.info.max_rows == 4


def load_of(frontend: Peer, query: int) -> control_pb2.GetLoadResponse:
    frontend.send(frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=query)))
    # Why a request waits may be said in between.
    while not (message := frontend.next_of_frontend()).HasField("load_reply"):
        assert message.HasField("waits"), message
    assert message.load_reply.query == query
    return message.load_reply.load


def test_the_loss_of_a_worker_is_detected_and_the_other_serves(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = bench.joined(pid=11)
    frontend, state = bench.greeted()
    assert state.ready
    bench.joined("w-2", pid=22)
    # The model is the same, so front ends receive nothing: the next message is the answer.
    assert [worker.pid for worker in load_of(frontend, 1).per_worker] == [11, 22]
    first.socket.close(0)
    query = 2
    while len(workers := load_of(frontend, query).per_worker) == 2:
        query += 1
    assert [worker.pid for worker in workers] == [22]
    said = [line for line in caplog.messages if line.startswith("worker w-")]
    assert [line.split(" ")[1:3] for line in said] == [["w-1", "joined"], ["w-2", "joined"], ["w-1", "lost:"]]


def test_the_journal_is_written_before_a_front_end_gets_the_turn(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with ExitStack() as stack:
        opened = OpenedJournal(path, sync=Sync.OFF, max_bytes=1 << 20, stack=stack)
        bench.journal = JournalKeeper(opened, bench.core)
        link, written = bench.links[1], list[tuple[bytes, bytes]]()
        send = link.send

        def spy(peer: str, frame: bytes) -> None:
            written.append((frame, (path / "journal").read_bytes()))
            send(peer, frame)

        link.send = spy  # type: ignore[method-assign]
        worker, frontend = bench.joined(), bench.frontend()
        lingering = submit(5)
        lingering.submit.linger_seconds = 30.0
        lingering.submit.secret_hash = bytes(32)
        frontend.send(HELLO, lingering)
        while not frontend.next_of_frontend().HasField("admitted"):
            pass
        admitting = [journal for frame, journal in written if b"r5" in journal or _has(frame, "admitted")]
        assert admitting and b"r5" in admitting[0]
        plan = worker.next_of_worker().plan
        result = worker_pb2.StepResult(generation=plan.generation, step=plan.step, status=worker_pb2.STEP_STATUS_OK)
        result.tokens = (3).to_bytes(4, "little")
        worker.send(worker_pb2.WorkerToCore(result=result))
        while not frontend.next_of_frontend().HasField("step_output"):
            pass
        journal = next(journal for frame, journal in written if _has(frame, "step_output"))
        [record] = [record for record in records_in(journal) if record.HasField("tokens")]
        assert (record.tokens.tokens, record.tokens.offsets) == (b"\3\0\0\0", bytes(4))
        bench.end()


def _has(frame: bytes, kind: str) -> bool:
    message = frontend_pb2.CoreToFrontend.FromString(frame)
    return message.HasField(kind) or any(one.HasField(kind) for one in message.batch.messages)


def records_in(journal: bytes) -> list[journal_pb2.JournalRecord]:
    return [journal_pb2.JournalRecord.FromString(payload) for payload in Frames(journal, FORMAT)]


def test_the_tokenizer_and_chat_template_reach_front_ends(bench: Bench) -> None:
    chat = worker_pb2.ChatFiles(named_templates={"tool_use": "u"}, tokenizer_config_json="{}")
    bench.joined(tokenizer_json=b"{}", chat_template="t", chat=chat)
    _, state = bench.greeted()
    assert (state.tokenizer_json, state.chat_template) == (b"{}", "t")
    assert worker_pb2.ChatFiles.FromString(state.chat_files) == chat


def test_a_worker_with_an_eos_token_outside_the_vocabulary_is_refused(bench: Bench) -> None:
    worker = bench.worker()
    worker.send(joining(eos_token_ids=[2**32 - 1]))
    bench.start()
    refused = worker.next_of_worker().refused
    assert (refused.retry, "4294967295" in refused.reason) == (False, True)


def test_a_request_is_rejected_while_the_service_stops(bench: Bench) -> None:
    bench.joined()
    frontend, _ = bench.greeted()
    bench.stop()
    assert frontend.next_of_frontend().HasField("draining")
    assert bench.child.asked.wait(TIMEOUT_SECONDS)
    frontend.send(submit(1))
    rejected = frontend.next_of_frontend().rejected
    assert (rejected.stream, rejected.code) == (1, frontend_pb2.REJECT_CODE_NOT_READY)
    bench.child.may_end.set()
    bench.thread.join(TIMEOUT_SECONDS)
    assert not bench.thread.is_alive()


def test_a_malformed_submit_is_rejected(bench: Bench) -> None:
    frontend = bench.frontend()
    frontend.send(HELLO)
    bad = submit(5)
    bad.submit.prompt = b"123"
    frontend.send(bad)
    bench.start()
    assert frontend.next_of_frontend().HasField("model_state")
    rejected = frontend.next_of_frontend().rejected
    assert (rejected.stream, rejected.code) == (5, frontend_pb2.REJECT_CODE_INVALID)
    assert "prompt has 3 bytes" in rejected.message


def test_a_peer_without_the_secret_can_neither_submit_nor_disturb_a_front_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start()
    frontend, _ = bench.greeted("f-77-0a")
    # One peer has the front end's identity, the other one an identity with the same process id.
    for name in ("f-77-0a", "f-77-0b\x1b[2J"):
        unknown = bench.frontend(name)
        for secret in (b"", b"x" * 32):
            unknown.send(frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=secret)))
        unknown.send(submit(1), frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=1)), b"\xff")
    while not [line for line in caplog.messages if line.startswith("front end f-77-0b")]:
        assert load_of(frontend, 2).waiting == 0
    # The other frames arrived with that one; none was answered.
    load_of(frontend, 3)
    assert not bench.peers[-1].socket.poll(0)
    for unknown in bench.peers[1:]:
        unknown.socket.close(0)
    frontend.send(submit(7))
    # The request is rejected for want of a worker; only a known front end gets that answer.
    assert frontend.next_of_frontend().rejected.stream == 7
    assert list(bench.core.frontends) == ["f-77-0a"]
    assert bench.child.killed == []
    # All frames of the unknown peer give one line.
    assert len(caplog.messages) == 1


def test_a_worker_without_the_key_is_refused_and_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    bench.recorder = Recorder(log, CoreConfig())
    stray, worker = bench.worker("w-1"), bench.worker("w-2")
    stray.send(joining(key=b"", model="stray", identity="stray"))
    bench.start()
    refused = stray.next_of_worker().refused
    assert not refused.retry
    assert "its key is not the one in /run/worker.key" in refused.reason
    stray.send(joining(key=b"x" * 32, model="stray", identity="stray"))
    worker.send(joining())
    joined = worker.next_of_worker().joined
    assert (joined.generation, joined.listen) == (1, "127.0.0.1:4711")
    assert bench.greeted()[1].info.model == "m"
    bench.recorder.flush()
    events = list(event_log.read(log).entries)
    assert [entry.peer for entry in events if entry.HasField("worker")] == ["w-2"]
    assert not [secret for secret in (KEY, SECRET, b"x" * 32) if secret in log.read_bytes()]


def test_a_flood_of_malformed_frames_is_answered_and_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stray = bench.worker()
    bench.start()
    bench.greeted()
    for _ in range(5000):
        stray.send(b"\xff\xff")
    stray.socket.send_multipart([b"in", b"parts"])
    stray.send(joining())
    answers = [stray.next_of_worker().WhichOneof("message") for _ in range(2)]
    assert answers == ["refused", "joined"]
    assert len([line for line in caplog.messages if "w-1" in line and "dropped" in line]) <= 2


def test_a_worker_with_a_too_small_frame_limit_is_lost_with_the_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.joined(max_frame_bytes=17 << 20)
    frontend, state = bench.greeted()
    assert state.ready
    with pytest.raises(PeerLostError, match="the peer accepts at most 17,825,792"):
        bench.links[0].send("w-1", bytes((17 << 20) + 1))
    # The limit is set here because the core refuses a worker that joins with it.
    bench.links[0].limit_frames("w-1", 10)
    frontend.send(submit(1))
    assert frontend.next_of_frontend().HasField("admitted")
    while "worker w-1 lost: a frame has" not in " ".join(caplog.messages):
        assert load_of(frontend, 1).waiting <= 1
    assert bench.core.lanes == {}


def test_the_first_served_model_is_announced_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tandem")
    caplog.handler.setLevel(logging.NOTSET)
    bench.joined()
    for number in range(2):
        assert bench.greeted(f"f-{number}")[1].ready
    ready = [line for line in caplog.messages if line.startswith("ready: ")]
    assert ready == ['ready: tandem generate --address 127.0.0.1:4711 "Return the"']


def test_news_of_a_front_ends_process_are_looked_at_in_the_turn_that_they_begin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, nothing here would happen at any time."""
    for name in ("_IDLE_SECONDS", "_WATCH_SECONDS"):
        monkeypatch.setattr(loop, name, 10 * TIMEOUT_SECONDS)
    bench.start()
    for _ in range(2):
        bench.woken.send(b"\0")
        assert bench.child.watched.wait(TIMEOUT_SECONDS)
        bench.child.watched.clear()
    bench.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, STOP_NOW])
def test_a_service_that_stops_sleeps_until_its_time_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Live requests may take minutes to end, and front ends seconds to deliver the last answers."""
    for name in ("_IDLE_SECONDS", "_WATCH_SECONDS", "_FAREWELL_SECONDS", "_SHORT_FAREWELL_SECONDS"):
        monkeypatch.setattr(loop, name, 10 * TIMEOUT_SECONDS)
    timeouts: queue.Queue[int] = queue.Queue()
    poller = select.poll()

    def poll(milliseconds: int) -> list[tuple[int, int]]:
        timeouts.put(milliseconds)
        return poller.poll(milliseconds)

    monkeypatch.setattr(loop.select, "poll", lambda: SimpleNamespace(register=poller.register, poll=poll))
    bench.start()
    assert timeouts.get(timeout=TIMEOUT_SECONDS) > 10_000
    bench.stop(number)
    assert timeouts.get(timeout=TIMEOUT_SECONDS) > 1000


def test_a_connection_that_ends_does_not_flood_other_peers_with_probes(bench: Bench) -> None:
    """A peer that reads slowly must not be lost to the probes of many turns."""
    worker = bench.joined()
    slow, busy, gone = (bench.greeted(f"f-{number}")[0] for number in (1, 2, 3))
    gone.socket.close(0)
    for query in range(600):
        if query % 20 == 0:
            # On a slow machine the queries take longer than a worker may be silent.
            worker.send(HEARTBEAT)
        busy.send(frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=query)))
        assert busy.next_of_frontend().load_reply.query == query
    probes = 0
    while slow.socket.poll(0):
        probes += slow.socket.recv() == b""
    assert 0 < probes <= 250
    assert "f-1" in bench.core.frontends
    assert bench.core.lanes
    assert bench.child.killed == ["f-3"]


def test_a_front_end_that_has_said_it_leaves_is_no_loss(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.core")
    bench.metrics = CoreMeter()
    bench.start()
    staying, lost, leaving = (bench.greeted(f"f-{number}")[0] for number in (1, 2, 3))
    leaving.send(frontend_pb2.FrontendToCore(leaving=frontend_pb2.Leaving()))
    assert load_of(leaving, 1).waiting == 0
    for frontend in (lost, leaving):
        frontend.socket.close(0)
    query = 1
    while len(bench.core.frontends) > 1:
        query += 1
        load_of(staying, query)
    said = {tuple(record.getMessage().split(" ")[2:5]): record.levelname for record in caplog.records}
    assert said == {("f-2", "was", "lost:"): "WARNING", ("f-3", "was", "asked"): "INFO"}
    assert (bench.child.killed, bench.metrics.frontend_deaths) == (["f-2"], 1)


def test_a_report_of_metrics_is_neither_an_event_nor_recorded(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench.metrics = CoreMeter()
    bench.recorder = Recorder(tmp_path / "log", bench.core.config)
    stray, frontend = bench.frontend("f-0"), bench.frontend()
    report = FrontMeter().report(64)
    stray.send(frontend_pb2.FrontendToCore(metrics=report))
    assert bench.links[1].socket.poll(1000 * TIMEOUT_SECONDS)
    bench.start()
    frontend.send(HELLO, frontend_pb2.FrontendToCore(metrics=report))
    report.values = b"short"
    frontend.send(frontend_pb2.FrontendToCore(metrics=report), frontend_pb2.FrontendToCore(flush_cache={"query": 1}))
    while not (message := frontend.next_of_frontend()).HasField("flush_reply"):
        pass
    assert (message.flush_reply.query, message.flush_reply.pages) == (1, 0)
    # The log has the first frame of each peer that was dropped.
    dropped = {record.getMessage() for record in caplog.records if "dropped a frame" in record.getMessage()}
    assert dropped == {
        "front end f-0: dropped a frame: it sent a message before its Hello",
        f"front end f-1: dropped a frame: its metrics have 5 bytes instead of {8 * NUM_CELLS}",
    }
    assert (bench.metrics.fronts.backlog_bytes, bench.metrics.frontend_deaths) == (64, 0)
    bench.end()
    entries = event_log.read(tmp_path / "log").entries
    frames = [entry.frontend for entry in entries if entry.HasField("frontend")]
    assert [frontend_pb2.FrontendToCore.FromString(frame) for frame in frames] == [
        frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello()),
        frontend_pb2.FrontendToCore(flush_cache={"query": 1}),
    ]
