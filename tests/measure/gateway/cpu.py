"""The gateway's CPU time per message of one token, with a fake service and 64 HTTP streams."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from tests.measure import call
from tests.measure.gateway.http_stream import read_stream
from tests.measure.harness import Bar, Measurement, spread
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Child

NUM_STREAMS = 64
# A stream at 40 tokens per second, as readers of chats see; all of them are about 2,600 messages per second.
PACED_RATE = 40.0
BAR_MICROSECONDS = 160.0


@contextmanager
def started(rate: float, *flags: str, **options: Any) -> Iterator[tuple[str, str, Child]]:
    """The fake service with these options and a gateway with these flags. Yields both addresses, and the gateway."""
    service = Child("service", call.words("gateway.service.serve", rate=rate, **options))
    address = service.wait_line(r"listening on (\S+)").group(1)
    where = ("--listen", "127.0.0.1:0", "--address", address)
    gateway = Child("gateway", ["tandem_client.gateway", *where, *flags])
    try:
        yield address, gateway.wait_line(r"gateway listening on https?://(\S+)").group(1), gateway
    except BaseException:
        print(gateway.output(), flush=True)
        raise
    finally:
        gateway.kill()
        service.kill()


async def _round(url: str, gateway: Child, tokens: int) -> tuple[float, float]:
    """Returns microseconds per message, and messages per second."""
    body = json.dumps({"prompt": "a", "model": "benchmark", "max_tokens": tokens, "stream": True}).encode()
    before, began = cpu_seconds(gateway.pid), time.perf_counter()
    counts = await asyncio.gather(*(read_stream(url, body) for _ in range(NUM_STREAMS)))
    seconds, cpu = time.perf_counter() - began, cpu_seconds(gateway.pid) - before
    messages = sum(counts)
    assert messages == NUM_STREAMS * tokens, f"{messages} messages with a token; {NUM_STREAMS * tokens} are due"
    return 1e6 * cpu / messages, messages / seconds


def measure(measurement: Measurement, rate: float, *, rounds: int, tokens: int) -> None:
    """Runs the rounds at a rate; 0 is full speed. Prints figures and the bar."""
    with started(rate) as (_, url, gateway):
        asyncio.run(_round(url, gateway, 20))
        costs, rates = zip(*(asyncio.run(_round(url, gateway, tokens)) for _ in range(rounds)), strict=True)
    each = spread(costs)
    name = "full speed" if not rate else f"{rate:g} tokens/s a stream"
    measurement.line(
        {
            "rate": name,
            "streams": NUM_STREAMS,
            "cpu_us_per_message": each,
            "messages_per_second": median(rates),
        }
    )
    measurement.bar(Bar(name=f"CPU us per message, {name}", value=each["median"], limit=BAR_MICROSECONDS))
