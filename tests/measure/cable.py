"""Measures a pulled cable between a worker and its scheduler: `python -m tests.measure.cable [--json] [--rounds N]`.

The worker is a content-checking one in a network namespace of its own, connected over TCP with CURVE; root and iproute2
are needed. While 16 streams run, the cable is pulled; three seconds after the service noticed, it is plugged in again.
Prints the seconds from the pull to the notice, and from plugging in to the next token of any stream and of all streams.
"""

import sys
import time

from tests.measure.harness import Measurement, spread
from tests.rigs.network import Network, why_not
from tests.rigs.processes import Rig
from tests.rigs.remote import RemoteKeys
from tests.rigs.streams import Stream
from tests.system.asks import Ask, send

_SHAPE = ("--page-size", "16", "--max-rows", "16", "--max-length", "8192", "--num-pages", "8192", "--step-ms", "5")
_NUM_STREAMS, _AWAY_SECONDS = 16, 3.0


def _count(stream: Stream) -> int:
    return len(stream.transcript.samples[0].tokens)


def one_round(rig: Rig, net: Network) -> dict[str, float]:
    """Seconds of one pull. All processes have ended when the rig is left."""
    keys = RemoteKeys(rig, "far")
    scheduler = rig.scheduler(*keys.scheduler_flags(net.address))
    rig.worker(*_SHAPE, *keys.worker_flags(scheduler, "far"), within=net.within)
    caller = rig.ready_caller(scheduler)
    asks = [Ask(prompt=(1, 2, number), max_new_tokens=4000) for number in range(_NUM_STREAMS)]
    streams = send(caller, asks, tokens=20)
    net.cut()
    pulled = time.monotonic()
    while caller.load().workers:
        time.sleep(0.01)
    noticed = time.monotonic() - pulled
    time.sleep(_AWAY_SECONDS)
    before = [_count(stream) for stream in streams]
    net.restore()
    plugged = time.monotonic()
    while all(_count(stream) == count for stream, count in zip(streams, before, strict=True)):
        time.sleep(0.005)
    first = time.monotonic() - plugged
    for stream, count in zip(streams, before, strict=True):
        stream.wait_tokens(count + 1)
    every = time.monotonic() - plugged
    for ask, stream in zip(asks, streams, strict=True):
        assert stream.transcript.samples[0].tokens == ask.expected().tokens[: _count(stream)]
        stream.cancel()
    return {"noticed": noticed, "first_token": first, "every_stream": every}


def main() -> int:
    """Returns the exit code: 2 if this machine allows no network namespaces."""
    measurement = Measurement("cable")
    measurement.flag("--rounds", type=int, default=3, metavar="N")
    args = measurement.begin()
    if reason := why_not():
        print(f"cable: {reason}", file=sys.stderr)
        return 2
    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        with Network() as net, Rig() as rig:
            rounds.append(one_round(rig, net))
    for name, what in (
        ("noticed", "seconds from the pull until the service knows"),
        ("first_token", "from plugging in until the next token of any stream"),
        ("every_stream", "from plugging in until the next token of all 16"),
    ):
        measurement.line({"what": what, "seconds": spread([each[name] for each in rounds])})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
