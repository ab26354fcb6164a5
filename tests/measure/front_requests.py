"""Measures what a request costs a front end: `python -m tests.measure.front_requests [--json] [--requests N]`.

One service with a content-checking worker; 16 requests of one output token at a time, by length and kind of the prompt.
Prints microseconds of the front end's CPU per request, its first and last messages included.
"""

import random

from tandem.v1 import inference_pb2 as pb

from tests.measure.harness import Measurement
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Rig
from tests.rigs.streams import Caller
from tests.system.asks import Ask

_SHAPE = ("--page-size", "128", "--max-rows", "32", "--max-length", "4096", "--num-pages", "2048")
_BUDGET = ("--token-budget", "4096")
_AT_ONCE = 16
_PROMPTS = (("ids", 30), ("ids", 1024), ("text", 1024), ("ids", 3000))


def _request(kind: str, length: int, rng: random.Random) -> pb.GenerateRequest:
    if kind == "ids":
        return Ask(prompt=tuple(rng.choices(range(200), k=length)), max_new_tokens=1).request()
    request = pb.GenerateRequest(text="".join(rng.choices("abcdefgh ", k=length)))
    request.stop.max_new_tokens = 1
    return request


def _send(caller: Caller, requests: list[pb.GenerateRequest]) -> None:
    for at in range(0, len(requests), _AT_ONCE):
        for stream in [caller.generate(request) for request in requests[at : at + _AT_ONCE]]:
            stream.result()


def measure(caller: Caller, pid: int, count: int) -> dict[str, float]:
    """Microseconds of CPU per request, by prompt."""
    rng, found = random.Random(1), dict[str, float]()
    for kind, length in _PROMPTS:
        requests = [_request(kind, length, rng) for _ in range(2 * _AT_ONCE + count)]
        _send(caller, requests[: 2 * _AT_ONCE])
        before = cpu_seconds(pid)
        _send(caller, requests[2 * _AT_ONCE :])
        found[f"{length} {'token ids' if kind == 'ids' else 'characters'}"] = 1e6 * (cpu_seconds(pid) - before) / count
    return found


def main() -> int:
    measurement = Measurement("front_requests")
    measurement.flag("--requests", type=int, default=480)
    args = measurement.begin()
    with Rig() as rig:
        scheduler, _, caller = rig.serve(*_SHAPE, *_BUDGET, late=False)
        measurement.line(
            {"requests": args.requests, "cpu_us": measure(caller, scheduler.frontend_pid(), args.requests)}
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
