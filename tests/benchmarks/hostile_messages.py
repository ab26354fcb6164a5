"""Measures the cost of 4 MB of unknown fields for the front end: `python -m tests.benchmarks.hostile_messages
[--json]`.

Each kind of message is parsed and refused in a process of its own, once by the service's code and once by the peer
(`UnknownFieldSet`, one Python object per field, the service's former code). CPU time is the minimum of several runs;
memory is the rise of the process's peak over its value before the first run.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.rpc import parsing
from scheduler_svc.frontend.rpc.status import Refusal
from tests.benchmarks.machine import description, peak_mb

NUM_BYTES = 4_000_000
BAR_MS = 30.0
RUNS, PEER_RUNS = 7, 1

_VARINT = b"\xf8\x01\x01"  # field 31
_SAMPLING = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].number
_LOGIT_BIAS = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name["logit_bias"].number


def _field(number: int, data: bytes) -> bytes:
    size, left = bytearray(), len(data)
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    return bytes([number << 3 | 2]) + bytes(size) + bytes([left]) + data


def _filled(piece: bytes) -> bytes:
    return piece * (NUM_BYTES // len(piece))


_GENERATE, _LOAD = inference_pb2.GenerateRequest, control_pb2.GetLoadRequest
_ENTRY = _field(_LOGIT_BIAS, b"\x08\x05" + _VARINT * 5)
# The message and the function that makes its bytes, by a readable name.
MESSAGES: dict[str, tuple[type[Message], Callable[[], bytes]]] = {
    "numbers": (_GENERATE, lambda: _filled(_VARINT)),
    "numbers, in GetLoad": (_LOAD, lambda: _filled(_VARINT)),
    "groups": (_LOAD, lambda: _filled(b"\xfb\x01\xfc\x01")),
    "strings": (_GENERATE, lambda: _filled(_field(15, b"x"))),
    "in one nested message": (_GENERATE, lambda: _field(_SAMPLING, _filled(_VARINT))),
    "in many nested messages": (_GENERATE, lambda: _filled(_field(_SAMPLING, _VARINT * 10))),
    "in one entry of a map": (
        _GENERATE,
        lambda: _field(_SAMPLING, _field(_LOGIT_BIAS, b"\x08\x05" + _filled(_VARINT))),
    ),
    "in many entries of a map": (_GENERATE, lambda: _field(_SAMPLING, _filled(_ENTRY))),
}


def as_served(kind: type[Message], data: bytes) -> None:
    """The front end's handling of a Generate message."""
    try:
        parsing.parse(kind, data)
    except Refusal:
        return
    raise AssertionError("accepted")


def as_before(kind: type[Message], data: bytes) -> None:
    """The peer: searches the message and every message inside it for unknown fields."""
    message = kind()
    message.ParseFromString(data)
    _walk(message)


def _walk(message: Message) -> None:
    for _ in UnknownFieldSet(message):
        return
    for field, value in cast(Any, message).ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                _walk(part)


def _measure(work: Callable[[type[Message], bytes], None], name: str, runs: int, answer: Any) -> None:
    kind, make = MESSAGES[name]
    data = make()
    before, spent = peak_mb(), list[float]()
    for _ in range(runs):
        begun = time.process_time()
        work(kind, data)
        spent.append(time.process_time() - begun)
    answer.send((1000 * min(spent), peak_mb() - before))


def measure(work: Callable[[type[Message], bytes], None], name: str, runs: int) -> tuple[float, float]:
    """Returns the CPU milliseconds per message and the rise of the memory peak in megabytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(work, name, runs, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def main() -> int:
    """Returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hostile_messages", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--no-peer", action="store_true", help="do not measure the peer")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in MESSAGES:
        cpu_ms, grown_mb = measure(as_served, name, RUNS)
        line: dict[str, Any] = {"message": name, "cpu_ms": cpu_ms, "grown_mb": grown_mb, "met": cpu_ms <= BAR_MS}
        if not args.no_peer:
            line["peer_cpu_ms"], line["peer_grown_mb"] = measure(as_before, name, PEER_RUNS)
        lines.append(line)
        if args.json:
            print(json.dumps(line))
    if not args.json:
        machine = ", ".join(f"{name} {value}" for name, value in description().items())
        print(f"4 MB of unknown fields, {machine}; the bar is {BAR_MS:g} ms of CPU per message\n")
        print(f"{'':26}{'served':>9}{'memory':>10}{'before':>12}{'memory':>10}")
        for line in lines:
            peer = ""
            if "peer_cpu_ms" in line:
                peer = f"{line['peer_cpu_ms']:>9.0f} ms{line['peer_grown_mb']:>7.0f} MB"
            verdict = "met" if line["met"] else "MISSED"
            print(f"{line['message']:26}{line['cpu_ms']:>6.1f} ms{line['grown_mb']:>7.0f} MB{peer}   {verdict}")
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
