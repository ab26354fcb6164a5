"""Measures connections that die unnoticed: `python -m tests.measure.dead_connections [--json]`.

A proxy between callers and a real service stops passing bytes on and closes nothing. Prints the seconds from then until
a stream ends, for both clients and the gateway, and until a stream with `resume` has its next token, also if the next
attempt to connect is swallowed. Then the seconds until a call ends whose connection is never answered. Last, how long a
connection without calls lives that is pinged every 5 s. All run at once, for 60 s.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from tandem_client import AsyncClient, Client
from tandem_client.errors import Unavailable
from tests.client.gateway.conftest import start_gateway
from tests.client.listeners import Proxy, silent_listener
from tests.measure.harness import Measurement
from tests.rigs.processes import Rig
from tests.rigs.raw_http2 import GOAWAY, PING, RawConnection

_SHAPE = ("--max-rows", "16", "--max-length", "32768", "--num-pages", "8192", "--page-size", "16", "--step-ms", "20")
_MANY_TOKENS, _READ_TOKENS = 30_000, 20
_PING_SECONDS, _NUM_PINGS = 5.0, 11


def _blocking(address: str, cut: Callable[[], None], *, resume: bool) -> float:
    """Seconds from the cut until the stream ends, or goes on."""
    with Client(address) as client:
        stream = client.generate([1, 2, 3], max_new_tokens=_MANY_TOKENS, resume=resume)
        last = time.monotonic()
        cut_at: float | None = None
        try:
            for delta in stream:
                now = time.monotonic()
                if cut_at is not None and now - last > 1.0:
                    return now - cut_at
                last = now
                if cut_at is None and delta.token_offset > _READ_TOKENS:
                    cut()
                    cut_at = time.monotonic()
        except Unavailable:
            assert not resume and cut_at is not None
            return time.monotonic() - cut_at
    raise AssertionError("the stream came to its end")


def _asynchronous(address: str, cut: Callable[[], None]) -> float:
    async def run() -> float:
        cut_at: float | None = None
        async with AsyncClient(address) as client:
            try:
                async for delta in client.generate([1, 2, 3], max_new_tokens=_MANY_TOKENS):
                    if cut_at is None and delta.token_offset > _READ_TOKENS:
                        cut()
                        cut_at = time.monotonic()
            except Unavailable:
                assert cut_at is not None
                return time.monotonic() - cut_at
        raise AssertionError("the stream came to its end")

    return asyncio.run(run())


def _gateway(address: str, cut: Callable[[], None]) -> float:
    gateway, url = start_gateway("--address", address)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": _MANY_TOKENS, "stream": True}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
        for _ in range(_READ_TOKENS):
            answer.readline()
        cut()
        cut_at = time.monotonic()
        assert b'"error"' in answer.read()
    took = time.monotonic() - cut_at
    gateway.terminate()
    return took


def _unanswered() -> float:
    began = time.monotonic()
    with silent_listener() as address, Client(address) as client:
        try:
            client.load()
        except Unavailable:
            return time.monotonic() - began
    raise AssertionError("a listener that says nothing has answered")


def _pinged(address: str) -> float:
    """Seconds until a connection without calls ends, or until the last ping is answered."""
    began = time.monotonic()
    with closing(RawConnection(address)) as connection:
        for _ in range(_NUM_PINGS):
            connection.ping()
            for frame in connection.frames():
                if frame.kind == GOAWAY:
                    return time.monotonic() - began
                if frame.kind == PING:
                    break
            time.sleep(_PING_SECONDS)
    return time.monotonic() - began


def measure(rig: Rig) -> dict[str, float]:
    """The seconds of each case."""
    scheduler = rig.scheduler()
    rig.worker(*_SHAPE)
    rig.caller(scheduler).wait_serving()
    proxies = [Proxy(scheduler.address) for _ in range(5)]
    ends, ends_async, gateway, goes_on, swallowed = proxies
    with ends, ends_async, gateway, goes_on, swallowed, ThreadPoolExecutor(8) as threads:
        found = {
            "a stream ends": threads.submit(_blocking, ends.address, ends.cut, resume=False),
            "a stream of asyncio ends": threads.submit(_asynchronous, ends_async.address, ends_async.cut),
            "a stream of the gateway ends": threads.submit(_gateway, gateway.address, gateway.cut),
            "a stream with resume goes on": threads.submit(_blocking, goes_on.address, goes_on.cut, resume=True),
            "the same, one attempt to connect swallowed": threads.submit(
                _blocking, swallowed.address, lambda: swallowed.cut(swallowed=1), resume=True
            ),
            "a call ends that is never answered": threads.submit(_unanswered),
            f"a connection lives with a ping every {_PING_SECONDS:g} s": threads.submit(_pinged, scheduler.address),
        }
        return {name: each.result() for name, each in found.items()}


def main() -> int:
    """Returns the exit code."""
    measurement = Measurement("dead_connections")
    measurement.begin()
    with Rig() as rig:
        measurement.line({"seconds": measure(rig)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
