"""Measures what hostile requests cost a front end until they are refused: `python -m tests.measure.hostile_messages
[--json]`.

Each kind of message of 4 MB is refused in a process of its own by the service's code, and is parsed in another one by
protobuf alone, which is what a service without a scan would do first. CPU time is the minimum of several runs; memory
is the rise of the process's peak over its value before the first run.
"""

import time
from collections.abc import Callable

from google.protobuf.message import DecodeError, Message
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.rpc import calls
from scheduler_svc.frontend.rpc.status import Refusal
from scheduler_svc.frontend.scan import Scan
from scheduler_svc.frontend.sizes import Sizes
from tests.measure import call
from tests.measure.harness import Bar, Measurement
from tests.measure.machine import peak_mb
from tests.rigs.processes import Child

NUM_BYTES = 4_000_000
BAR_MS = 5.0
RUNS, PEER_RUNS = 7, 3
MOST_SECONDS = 120.0
# A model with a long context: every limit that follows from it is larger than the message.
SIZES = Sizes(prompt_tokens=131_071, text_chars=131_072 * 16, length=131_072)

_VARINT = b"\xf8\x01\x01"  # field 31
_GENERATE, _RESUME = inference_pb2.GenerateRequest, inference_pb2.ResumeRequest
_ABORT, _LOAD = control_pb2.AbortRequest, control_pb2.GetLoadRequest
_NUMBERS = {each.name: each.number for each in _GENERATE.DESCRIPTOR.fields}
_SAMPLING, _STOP, _TOKEN_IDS = _NUMBERS["sampling"], _NUMBERS["stop"], _NUMBERS["token_ids"]
_LOGIT_BIAS, _STOP_STRINGS, _BANNED = 10, 3, 12


def _field(number: int, data: bytes) -> bytes:
    size, left = bytearray(), len(data)
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    return bytes([number << 3 | 2]) + bytes(size) + bytes([left]) + data


def _filled(piece: bytes) -> bytes:
    return piece * (NUM_BYTES // len(piece))


# The message and the function that makes its bytes, by a readable name.
MESSAGES: dict[str, tuple[type[Message], Callable[[], bytes]]] = {
    "500,000 stop strings": (_GENERATE, lambda: _field(_STOP, _field(_STOP_STRINGS, b"stop12") * 500_000)),
    "empty stop strings": (_GENERATE, lambda: _field(_STOP, _filled(_field(_STOP_STRINGS, b"")))),
    "4,000,000 prompt ids": (_GENERATE, lambda: _field(_TOKEN_IDS, _field(1, _filled(b"\x05")))),
    "prompt ids, not packed": (_GENERATE, lambda: _field(_TOKEN_IDS, _filled(b"\x08\x05"))),
    "biases": (_GENERATE, lambda: _field(_SAMPLING, _filled(_field(_LOGIT_BIAS, b"\x08\x05\x15\0\0\0\0")))),
    "banned tokens": (_GENERATE, lambda: _field(_SAMPLING, _field(_BANNED, _filled(b"\x05")))),
    "empty messages": (_GENERATE, lambda: _filled(_field(_SAMPLING, b""))),
    "offsets": (_RESUME, lambda: _filled(_field(3, b""))),
    "ids to abort": (_ABORT, lambda: _filled(_field(1, b"a"))),
    "deep groups": (_LOAD, lambda: _filled(b"\xfb\x01")),
    "unknown numbers": (_GENERATE, lambda: _filled(_VARINT)),
    "unknown groups": (_LOAD, lambda: _filled(b"\xfb\x01\xfc\x01")),
    "unknown strings": (_GENERATE, lambda: _filled(_field(15, b"x"))),
    "unknown, in one message": (_GENERATE, lambda: _field(_SAMPLING, _filled(_VARINT))),
    "unknown, in many": (_GENERATE, lambda: _filled(_field(_SAMPLING, _VARINT * 10))),
    "unknown, in an entry": (
        _GENERATE,
        lambda: _field(_SAMPLING, _field(_LOGIT_BIAS, b"\x08\x05" + _filled(_VARINT))),
    ),
}


def as_served(kind: type[Message], data: bytes) -> None:
    """The front end's handling of a message, without its limit of bytes."""
    try:
        Scan(kind.DESCRIPTOR).check(data, SIZES)
        calls.parse(kind, data)
    except Refusal:
        return
    raise AssertionError("accepted")


def as_parsed(kind: type[Message], data: bytes) -> None:
    """The peer: protobuf alone."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    message.DiscardUnknownFields()


def measured(message: str, *, is_peer: bool) -> tuple[float, float]:
    """The least CPU milliseconds per message of several runs, and the rise of this process's peak in megabytes."""
    kind, make = MESSAGES[message]
    work, runs = (as_parsed, PEER_RUNS) if is_peer else (as_served, RUNS)
    data = make()
    before, spent = peak_mb(), list[float]()
    for _ in range(runs):
        begun = time.process_time()
        work(kind, data)
        spent.append(time.process_time() - begun)
    return 1000 * min(spent), peak_mb() - before


def measure(message: str, *, is_peer: bool) -> tuple[float, float]:
    """Calls `measured` in a process of its own."""
    child = Child(message, call.words("hostile_messages.measured", message=message, is_peer=is_peer))
    return call.answer(child, MOST_SECONDS)


def main() -> int:
    measurement = Measurement("hostile_messages")
    measurement.begin()
    measurement.note("messages of 4 MB: CPU and memory until the refusal, and of a parser alone")
    for name in MESSAGES:
        cpu_ms, grown_mb = measure(name, is_peer=False)
        peer_cpu_ms, peer_grown_mb = measure(name, is_peer=True)
        peer = {"peer_cpu_ms": peer_cpu_ms, "peer_grown_mb": peer_grown_mb}
        measurement.row({"message": name, "cpu_ms": cpu_ms, "grown_mb": grown_mb, **peer})
        measurement.bar(Bar(name=f"CPU ms, {name}", value=cpu_ms, limit=BAR_MS))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
