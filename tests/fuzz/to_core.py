"""Random frames of workers and front ends to the core, in this process: `Inbound`, the wire parsers and the real core.

Owns the links, which are lists in memory, and a virtual clock. A content-checking worker and a well-behaved front end
use the same core. Some of the hostile peers know the key and the secret, so their messages reach the core's state.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.door.tls_files import ReadyCommand
from scheduler_svc.shell.dispatch import EffectDispatcher, ServedModel
from scheduler_svc.shell.inbound import Credentials, Inbound
from tandem_contract.codec import packed
from tests.fuzz.messages import MessageMaker
from tests.rigs import checking_worker
from tests.rigs.executor import Executor
from tests.rigs.faults import Faults
from tests.rigs.lateness import Lateness
from tests.rigs.worker_session import WorkerSession
from tests.system.asks import Ask

_KEY, _SECRET = b"k" * 32, b"s" * 32
_TURN_FRAMES = 64
_FRAME_SECONDS = 0.0005
_AUDIT_EVERY_TURNS = 8
# After this number of turns a hostile peer disconnects and comes back under a new name, as a crashed process would.
_LIFE_TURNS = 40
_FINAL_TURNS = 20_000
_SHAPE = ("--page-size", "16", "--num-pages", "200", "--max-rows", "8", "--max-length", "256", "--token-budget", "64")


class MemoryLink:
    """Stands for a RouterLink: what peers sent, and what was sent to each peer."""

    def __init__(self) -> None:
        self.arrived: deque[tuple[str, bytes | None]] = deque()
        self.sent: dict[str, deque[bytes]] = {}

    def receive(self, limit: int) -> Iterator[tuple[str, bytes | None]]:
        for _ in range(min(limit, len(self.arrived))):
            yield self.arrived.popleft()

    def send(self, peer: str, payload: bytes) -> None:
        # Only the well-behaved peers read.
        self.sent.setdefault(peer, deque(maxlen=10_000 if peer in ("w-good", "f-good") else 1)).append(payload)

    def host_of(self, peer: str) -> str:
        """Every peer is on this host."""
        return ""

    def limit_frames(self, peer: str, max_bytes: int) -> None:
        """Nothing is limited."""

    def check(self, peers: object, now: float) -> list[tuple[str, str]]:
        """Returns no failure: the core expels no peer."""
        return []


class CoreUnderFire:
    """`run` sends hostile frames; `check_service` then compares answers to well-behaved requests with the oracle."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.plans: list[bytes] = []
        rng = self._rng = random.Random(f"{seed} frames to the core")
        self._now = 0.0
        self._num_turns = self._life = 0
        # (number, kind, life) of the hostile peers that have joined.
        self._proved: set[tuple[int, str, int]] = set()
        self._workers, self._frontends = MemoryLink(), MemoryLink()
        config = CoreConfig(prove_workers=True, max_waiting=64, step_timeout_seconds=2.0, silence_timeout_seconds=2.0)
        self._core = Scheduler(config)
        model = ServedModel(default_max_new_tokens=16, max_waiting=64, cache_root=b"r" * 32)
        self._dispatcher = EffectDispatcher(
            workers=cast(Any, (self._workers,)),
            # The real ones would kill the processes that hostile Joins name.
            worker_processes=cast(Any, SimpleNamespace(joined=_ignore, kill=_ignore)),
            frontends=cast(Any, self._frontends),
            served_model=model,
            ready=ReadyCommand(),
            listen=lambda: "127.0.0.1:1",
            joined=lambda: self._core.lanes,
        )
        self._inbound = Inbound(
            core=self._core,
            handle=self._handle,
            dispatcher=self._dispatcher,
            credentials=Credentials(worker_key=_KEY, key_path=Path("worker.key"), frontend_secret=_SECRET),
            on_frontend_lost=_ignore,
            tokens=None,
        )
        self._makers = {
            "w": MessageMaker(worker_pb2.WorkerToCore, rng),
            "f": MessageMaker(frontend_pb2.FrontendToCore, rng),
        }
        args = checking_worker.parse(["--runtime-dir", "unused", "--without-key", *_SHAPE])
        self._join = checking_worker.join_message(args)
        self._join.key = _KEY
        self._makers["w"].keep(worker_pb2.WorkerToCore(join=self._join).SerializeToString())
        self.violations: list[str] = []
        self._session = WorkerSession(
            join=self._join,
            executor=Executor(checking_worker.shape_of(args), faults=Faults(), on_violation=self.violations.append),
            lateness=Lateness(seed=None, step_seconds=0.0),
            faults=Faults(),
            heartbeat_seconds=0.5,
            retry_seconds=0.05,
            max_in_flight=2,
            on_violation=self.violations.append,
            on_phase=lambda _: None,
        )
        self._frontends.arrived.append(("f-good", _hello()))

    @property
    def dropped(self) -> int:
        return self._inbound.dropped.total

    def uncovered(self) -> set[str]:
        """The fields of the two kinds of frames that no frame has set."""
        return set[str]().union(*(maker.fields() - maker.covered for maker in self._makers.values()))

    def run(self, count: int) -> None:
        """Sends `count` hostile frames. Every exception is a failure."""
        while self.counts["frames"] < count:
            for _ in range(_TURN_FRAMES):
                self.counts["frames"] += 1
                self._send_hostile()
            if self._rng.random() < 0.2:
                self._submit(self._rng.randrange(1, 1 << 40), self._ask())
            self._turn()
            if self._num_turns % _LIFE_TURNS == 0:
                self._lose_hostile()

    def check_service(self) -> None:
        """Drops all hostile peers and asserts that ten requests get the oracle's answers."""
        self._lose_hostile()
        asks = [self._ask() for _ in range(10)]
        self._frontends.sent.clear()
        first = 1 << 50
        for idx, ask in enumerate(asks):
            self._submit(first + idx, ask)
        tokens: dict[int, list[int]] = {first + idx: [] for idx in range(len(asks))}
        ended: dict[int, str] = {}
        for _ in range(_FINAL_TURNS):
            self._turn()
            for stream, answer in self._answers():
                if isinstance(answer, str):
                    ended[stream] = answer
                else:
                    tokens.get(stream, []).extend(answer)
            if tokens.keys() <= ended.keys():
                break
        for stream, ask in zip(tokens, asks, strict=True):
            assert ended.get(stream) == "", f"a request after the hostile frames ended with {ended.get(stream)!r}"
            assert tokens[stream] == list(ask.completion().tokens), "tokens after the hostile frames are wrong"
        audit(self._core)
        assert self.violations == [], self.violations

    # Peers --------------------------------------------------------------------------------------------------------

    def _send_hostile(self) -> None:
        rng, kind = self._rng, self._rng.choice("wf")
        number = rng.randrange(6)
        peer = f"{kind}-{self._life}-{number}"
        link = self._workers if kind == "w" else self._frontends
        parts = None if rng.random() < 0.001 else self._makers[kind].frame()
        while kind == "f" and parts is not None and _drains_the_service(parts):
            parts = self._makers[kind].frame()
        # Peers 0 to 3 have proved themselves; the others send the same without.
        if number < 4 and parts is not None and (number, kind, self._life) not in self._proved:
            self._proved.add((number, kind, self._life))
            parts = _hello() if kind == "f" else self._hostile_join()
        link.arrived.append((peer, parts))

    def _hostile_join(self) -> bytes:
        """A Join with the right key and, half of the time, odd sizes."""
        join = worker_pb2.Join()
        join.CopyFrom(self._join)
        if self._rng.random() < 0.5:
            other = cast(Any, self._makers["w"].message())
            while not other.HasField("join"):
                other = cast(Any, self._makers["w"].message())
            join.MergeFrom(other.join)
        join.key = _KEY
        return worker_pb2.WorkerToCore(join=join).SerializeToString()

    def _lose_hostile(self) -> None:
        for link, known in ((self._workers, list(self._core.lanes)), (self._frontends, list(self._core.frontends))):
            for peer in known:
                if peer not in ("w-good", "f-good"):
                    self._dispatcher.lost_peers.append((cast(Any, link), peer, "it disconnected"))
        self._life += 1
        self._proved.clear()

    def _ask(self) -> Ask:
        """A greedy request, because the front end, which is not here, writes the parameters of others."""
        rng = self._rng
        lark = f"start: /.*/ // {rng.randrange(3)} toy_complete=20" if rng.random() < 0.3 else ""
        return Ask(
            prompt=tuple(rng.randrange(256) for _ in range(rng.randint(1, 40))),
            max_new_tokens=rng.randint(1, 40),
            ignore_eos=not lark,
            lark=lark,
        )

    def _submit(self, stream: int, ask: Ask) -> None:
        submit = frontend_pb2.Submit(
            stream=stream,
            request_id=f"good-{stream}",
            prompt=packed(np.array(ask.prompt, np.int32)),
            max_new_tokens=ask.max_new_tokens,
            num_samples=1,
            ignore_eos=ask.ignore_eos,
            prefix_root=b"p" * 32,
            num_logprobs=0,
            constraint=ask.lark.encode(),
            constraint_hash=sha256(ask.lark.encode()).digest() if ask.lark else b"",
        )
        self._frontends.arrived.append(("f-good", frontend_pb2.FrontendToCore(submit=submit).SerializeToString()))

    # One turn -----------------------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event, **_: Any) -> list[fx.Effect]:
        return self._core.handle(event, self._now)

    def _turn(self) -> None:
        self._num_turns += 1
        self._now += _FRAME_SECONDS * _TURN_FRAMES
        self._session.advance(self._now)
        while self._session.outgoing:
            self._workers.arrived.append(("w-good", self._session.outgoing.popleft().SerializeToString()))
        effects = self._inbound.receive()
        effects += self._handle(ev.Tick())
        self._dispatcher.dispatch(effects)
        frames = self._workers.sent.get("w-good", deque())
        while frames:
            frame = frames.popleft()
            if len(self.plans) < 500:
                self.plans.append(frame)
            self._session.receive(worker_pb2.CoreToWorker.FromString(frame), self._now)
        if self._num_turns % _AUDIT_EVERY_TURNS == 0:
            audit(self._core)

    def _answers(self) -> Iterator[tuple[int, list[int] | str]]:
        """Yields (stream, tokens) and, at the end of a stream, (stream, failure), which is empty for a good end."""
        frames = self._frontends.sent.get("f-good", deque())
        while frames:
            frame = frontend_pb2.CoreToFrontend.FromString(frames.popleft())
            for message in frame.batch.messages if frame.HasField("batch") else [frame]:
                if message.HasField("rejected"):
                    yield message.rejected.stream, f"rejected: {message.rejected.message}"
                output = message.step_output
                streams, tokens = np.frombuffer(output.streams, "<u8"), np.frombuffer(output.tokens, "<i4")
                for stream, token in zip(streams.tolist(), tokens.tolist(), strict=True):
                    yield stream, [token]
                for end in output.ends:
                    yield end.stream, end.failure.message


def _ignore(*_: object) -> None:
    """No process of a worker or front end is here."""


def _hello() -> bytes:
    return frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=_SECRET)).SerializeToString()


def _drains_the_service(frame: bytes) -> bool:
    """Returns whether the frame would end the service under test, as it should."""
    try:
        message = frontend_pb2.FrontendToCore.FromString(frame)
    except DecodeError:
        return False
    return message.HasField("drain") and not message.drain.request.worker and not message.drain.stop_replies
