"""Measures the exchange of a plan and its result over a socket file, TCP, and TCP with CURVE, on this machine:
`python -m tests.measure.links [--json] [--exchanges N]`.

The core's end is the scheduler's own link, in this process; the worker's end is the worker's own connection, in another
process that answers at once. Frames have the sizes of a decode plan of 256 rows with new pages, and of a large start.
`exchange_us` is the time of one exchange, `cpu_us` this process's CPU time for it, the threads of ZeroMQ included. The
links take turns; each figure is the least of the rounds: where the system places the threads changes it twofold.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.link.connection import Connection, read_keys
from scheduler_svc.remote import WORKERS, RemoteListener, make
from scheduler_svc.shell.links import RemoteLink, RouterLink
from tests.measure import call
from tests.measure.harness import Bar, Measurement
from tests.rigs.processes import Child

# The most CPU time that CURVE may add to an exchange of a decode plan, in microseconds.
BAR_US = 100.0
ROWS, ROUNDS = 256, 25
KINDS = ("ipc", "tcp", "curve")
_RESULT = pb.WorkerToCore(
    result=pb.StepResult(generation=3, step=1 << 20, status=pb.STEP_STATUS_OK, tokens=bytes(4 * ROWS), compute_us=9000)
).SerializeToString()


def plans() -> dict[str, bytes]:
    """A decode plan of 256 rows of which 16 get a page, and the start of a prompt of 128 Ki tokens with 8 Ki pages."""
    decode = pb.StepPlan(generation=3, step=1 << 20, checksum=1 << 63, decode_rows=bytes(4 * ROWS))
    decode.appends.rows = decode.appends.pages = bytes(4 * 16)
    start = pb.StepPlan(generation=3, step=1 << 20, checksum=1 << 63)
    start.started.tokens, start.started.pages = bytes(4 << 17), bytes(4 << 13)
    return {
        "decode plan": pb.CoreToWorker(plan=decode).SerializeToString(),
        "start of 131,072 tokens": pb.CoreToWorker(plan=start).SerializeToString(),
    }


def answer(endpoint: str, keys: str | None) -> None:
    """The worker's end: says hello, then answers each frame, until an empty one."""
    connection = Connection(zmq.Context(), endpoint, None if keys is None else read_keys(Path(keys), endpoint))
    while not connection.send(b"hello"):
        time.sleep(0.01)
    while frame := connection.socket.recv():
        assert len(frame) > 100
        connection.send(_RESULT)
    connection.close(linger_ms=0)


class Exchange:
    """One link with a worker at its other end."""

    def __init__(self, link: RouterLink, endpoint: str, keys: Path | None) -> None:
        self._worker = Child("worker", call.words("links.answer", endpoint=endpoint, keys=keys and str(keys)))
        self.link = link
        self._peer = ""
        self._peer, _ = self._receive()

    def _receive(self) -> tuple[str, bytes | None]:
        while True:
            self.link.socket.poll()
            for message in self.link.receive(1):
                return message

    def round(self, frame: bytes, count: int) -> tuple[float, float]:
        """Returns wall time and CPU time of one exchange, in microseconds."""
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.link.send(self._peer, frame)
            self._receive()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        return 1e6 * seconds / count, 1e6 * cpu_seconds / count

    def close(self) -> None:
        self.link.send(self._peer, b"")
        self._worker.wait(30)
        self.link.close()


@contextmanager
def exchanges(folder: Path) -> Iterator[dict[str, Exchange]]:
    make(folder / "keys", ["far"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # As for the remote link, so that each has an I/O thread of its own.
    of_tcp: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = RemoteListener("tcp://127.0.0.1:0", folder / "keys")
    listener.start()
    curve = RemoteLink(listener, max_frame_bytes=128 << 20)
    tcp = RouterLink(of_tcp, "tcp://127.0.0.1:0", max_frame_bytes=128 << 20)
    at = f"ipc://{folder}/w"
    found = {
        "ipc": Exchange(RouterLink(context, at, max_frame_bytes=128 << 20), at, None),
        "tcp": Exchange(tcp, tcp.socket.getsockopt_string(zmq.LAST_ENDPOINT), None),
        "curve": Exchange(curve, curve.endpoint, folder / "keys" / WORKERS / "far"),
    }
    yield found
    for each in found.values():
        each.close()
    for each in (context, of_tcp, listener.context):
        each.term()


def measure(num_exchanges: int) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds by plan and link."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, exchanges(Path(folder)) as links:
        draw = random.Random(0)
        for name, frame in plans().items():
            count = num_exchanges if len(frame) < 1 << 16 else max(1, num_exchanges // 20)
            rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for number in range(ROUNDS + 1):
                # In a drawn order, because a link's time depends on the one before.
                for kind in draw.sample(KINDS, len(KINDS)):
                    figure = links[kind].round(frame, count)
                    # The first round warms up.
                    if number:
                        rounds[kind].append(figure)
            figures[name] = {
                kind: {"exchange_us": min(one for one, _ in found), "cpu_us": min(cpu for _, cpu in found)}
                for kind, found in rounds.items()
            } | {"bytes": {"down": len(frame), "up": len(_RESULT)}}
    return figures


def main() -> int:
    measurement = Measurement("links")
    measurement.flag("--exchanges", type=int, default=200, metavar="N", help="of each round (default: 200)")
    args = measurement.begin()
    figures = measure(args.exchanges)
    for name, of_plan in figures.items():
        measurement.line({"plan": name, **of_plan})
    decode = figures["decode plan"]
    added = decode["curve"]["cpu_us"] - decode["tcp"]["cpu_us"]
    measurement.bar(Bar(name="us of CPU that CURVE adds to a decode plan", value=added, limit=BAR_US))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
