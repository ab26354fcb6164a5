"""The content-checking worker as a process: `python -m tests.rigs.checking_worker --runtime-dir DIR …`.

Owns the ZeroMQ socket, the clock, signals and flags. What it prints, a line each: its phases (`joined generation=3`).
Violations go to the file given by --violations, a line each, flushed at once.
"""

import argparse
import dataclasses
import hashlib
import os
import secrets
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import zmq
from tandem.internal.v1 import worker_pb2 as pb

from tandem_contract.child import die_with_parent
from tandem_contract.files import KeyFile
from tandem_contract.stopping import STOP
from tests.rigs import byte_tokenizer
from tests.rigs.executor import Executor, Shape
from tests.rigs.faults import Faults
from tests.rigs.in_flight import InFlightWriter
from tests.rigs.lateness import Lateness
from tests.rigs.worker_session import Phase, WorkerSession

_MAX_MESSAGE_BYTES = 64 << 20
_HIGH_WATER_MARK = 1000
# More plans at once are a violation.
_MAX_IN_FLIGHT = 2
_SHAPE_FLAGS = (
    "page_size", "num_pages", "max_rows", "max_length", "token_budget", "chunk_align", "spare_logit_rows",
    "host_pages", "window", "sink_tokens", "page_copy_us", "token_us",
)  # fmt: skip
# What a Join tells of a shape.
_JOINED = (
    "vocab_size", "page_size", "num_pages", "max_rows", "max_length", "token_budget", "chunk_align", "logit_rows",
    "window", "sink_tokens", "host_pages", "page_copy_us", "token_us", "eos_token_ids",
)  # fmt: skip
# Flags of the same names order them.
_FAULTS = [each.name for each in dataclasses.fields(Faults)]


def _steps(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(",") if part)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Every setting has a default that suits a small test."""
    parser = argparse.ArgumentParser(prog="checking_worker", allow_abbrev=False)
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--connect", help="tcp://HOST:PORT instead of the socket in the runtime folder")
    parser.add_argument("--keys", type=Path, help="folder with worker.secret and scheduler.public, for --connect")
    parser.add_argument("--violations", type=Path)
    parser.add_argument("--exit-with-parent", action="store_true")
    parser.add_argument("--model", default="checking")
    parser.add_argument("--identity", help="default: a hash of what is served")
    parser.add_argument("--without-key", action="store_true", help="join as a stray process would")
    parser.add_argument("--protocol", type=int, default=pb.PROTOCOL_CURRENT)
    parser.add_argument("--standby", action="store_true", help="wait without requests until a worker is lost")
    shape = Shape()
    for name in _SHAPE_FLAGS:
        default = getattr(shape, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--no-tokenizer", action="store_true")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--response-template", type=Path)
    parser.add_argument("--lateness", type=int, metavar="SEED", help="apply and answer late, at random")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--slow-file", type=Path, help="while it exists, steps are slow (`lateness.py`)")
    parser.add_argument("--fast-file", type=Path, help="once it exists, steps take no time (`linked_worker.py`)")
    parser.add_argument("--heartbeat-seconds", type=float, default=1.0)
    parser.add_argument("--retry-seconds", type=float, default=0.05, help="after a refusal that allows it")
    parser.add_argument("--in-flight-file", type=Path, help="tell there how many plans are in flight")
    for name in _FAULTS:
        kind = {"type": _steps, "default": frozenset()} if name.endswith("_steps") else {"type": int}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, help="see `faults.py`")
    return parser.parse_args(arguments)


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(
        **{name: getattr(args, name) for name in _SHAPE_FLAGS},
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        sampled_vocab=byte_tokenizer.NUM_DRAWN,
        eos_token_ids=(byte_tokenizer.EOS_ID,),
    )


def join_message(args: argparse.Namespace) -> pb.Join:
    shape = shape_of(args)
    tokenizer = b"" if args.no_tokenizer else byte_tokenizer.tokenizer_json()
    template, response = (path.read_text() if path else "" for path in (args.chat_template, args.response_template))
    digest = hashlib.sha256(repr(shape).encode() + tokenizer + template.encode() + response.encode()).hexdigest()
    return pb.Join(
        protocol=args.protocol,
        identity=args.identity or f"checking-{digest[:16]}",
        model=args.model,
        **{name: getattr(shape, name) for name in _JOINED},
        defaults=pb.GenerationDefaults(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0),
        tokenizer_json=tokenizer,
        chat_template=template,
        chat=pb.ChatFiles(response_template_json=response),
        pid=os.getpid(),
        standby=args.standby,
        max_frame_bytes=_MAX_MESSAGE_BYTES,
        device="none (content checking)",
        dtype="uint64",
        key=b"" if args.without_key or args.connect else KeyFile(Path(args.runtime_dir)).read(),
    )


def _say(line: str) -> None:
    print(line, flush=True)


def violated(file: Path | None, line: str) -> None:
    """Tells a violation, in this file too."""
    _say(f"violation {line}")
    if file is not None:
        with file.open("a") as opened:
            opened.write(f"pid {os.getpid()}: {line}\n")


def _session(args: argparse.Namespace) -> WorkerSession:
    notice = partial(violated, args.violations)
    faults = Faults(**{name: getattr(args, name) for name in _FAULTS})
    return WorkerSession(
        join=join_message(args),
        executor=Executor(shape_of(args), faults=faults, on_violation=notice),
        lateness=Lateness(seed=args.lateness, step_seconds=args.step_ms / 1000, slow_file=args.slow_file),
        faults=faults,
        heartbeat_seconds=args.heartbeat_seconds,
        retry_seconds=args.retry_seconds,
        max_in_flight=_MAX_IN_FLIGHT,
        on_violation=notice,
        on_phase=_say,
    )


def open_dealer(context: zmq.Context, args: argparse.Namespace) -> zmq.Socket:
    """A socket with a new routing id, not connected yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, f"w-{os.getpid()}-{secrets.token_hex(4)}".encode())
    dealer.setsockopt(zmq.LINGER, 200)
    dealer.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    dealer.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    dealer.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    # Results for a core that is gone are not kept for the next one.
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    if args.connect:
        dealer.curve_serverkey = (args.keys / "scheduler.public").read_bytes().strip()
        secret = (args.keys / "worker.secret").read_bytes().strip()
        dealer.curve_secretkey, dealer.curve_publickey = secret, zmq.curve_public(secret)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 500)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 1000)
    return dealer


# After a refused handshake libzmq does not always connect again, nor report a disconnection.
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Connection:
    """The present DEALER. Over TCP a connection that ends is replaced, because its routing id may still be in use."""

    def __init__(self, args: argparse.Namespace, wake: socket.socket) -> None:
        self._args, self._wake = args, wake
        self._context = zmq.Context()
        self._open()

    def _open(self) -> None:
        self.dealer = open_dealer(self._context, self._args)
        # Before it connects: a handshake may be refused at once.
        self._monitor = self.dealer.get_monitor_socket(_ENDS) if self._args.connect else None
        self.dealer.connect(self._args.connect or f"ipc://{self._args.runtime_dir}/worker.sock")
        self._poller = zmq.Poller()
        for each in filter(None, (self.dealer, self._wake, self._monitor)):
            self._poller.register(each, zmq.POLLIN)

    def has_ended(self) -> bool:
        """Whether the connection has ended; then another one is opened."""
        if self._monitor is None or not self._monitor.poll(0):
            return False
        self._close_dealer(linger=0)
        # So that a refused worker does not occupy a core.
        time.sleep(0.1)
        self._open()
        return True

    def poll(self, wait: float | None) -> dict[object, int]:
        return dict(self._poller.poll(None if wait is None else wait * 1000))

    def close(self) -> None:
        self._close_dealer(linger=None)
        self._context.term()

    def _close_dealer(self, linger: int | None) -> None:
        if self._monitor is not None:
            self.dealer.disable_monitor()
            self._monitor.close(0)
        self.dealer.close(linger)


def _send(dealer: zmq.Socket, session: WorkerSession) -> None:
    while session.outgoing:
        message = session.outgoing.popleft()
        try:
            dealer.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            session.outgoing.clear()
            now = time.monotonic()
            if session.phase == Phase.JOINED:
                session.link_lost(now)
            session.join_unsent(now)


def _serve(
    session: WorkerSession, connection: Connection, wake: socket.socket, in_flight: InFlightWriter | None
) -> int:
    while True:
        if connection.has_ended() and session.phase != Phase.HUNG:
            session.link_lost(time.monotonic())
        dealer = connection.dealer
        session.advance(time.monotonic())
        if session.phase == Phase.STOPPED:
            return 3
        if session.phase == Phase.EXITED:
            os.kill(os.getpid(), signal.SIGKILL)
        if in_flight is not None:
            if in_flight.shall_hang:
                session.hang()
            in_flight.write(session.num_unanswered, session.num_answered)
        _send(dealer, session)
        wait = session.wait_seconds(time.monotonic())
        ready = connection.poll(wait)
        if wake.fileno() in ready:
            dealer.send(pb.WorkerToCore(leave=pb.Leave()).SerializeToString(), zmq.NOBLOCK)
            return 0
        if dealer in ready:
            data = dealer.recv(zmq.NOBLOCK)
            if session.phase != Phase.HUNG:
                session.receive(pb.CoreToWorker.FromString(data), time.monotonic())
                if session.phase == Phase.LEAVING:
                    dealer.send(pb.WorkerToCore(leave=pb.Leave()).SerializeToString(), zmq.NOBLOCK)
                    return 0


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM (0), a refusal for good (3), or an ordered fault."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if args.exit_with_parent:
        die_with_parent()
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT, STOP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    connection = Connection(args, wake)
    session = _session(args)
    _say("waits for a scheduler")
    try:
        return _serve(session, connection, wake, InFlightWriter(args.in_flight_file) if args.in_flight_file else None)
    except zmq.Again:
        # SIGTERM came, and no core is there for a last message.
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main())
