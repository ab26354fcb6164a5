"""The gateway's CPU time per message of one token, with a fake service and 64 HTTP streams."""

import asyncio
import json
import time
from dataclasses import dataclass
from statistics import median

from tests.measure.gateway.http_stream import read_stream
from tests.measure.harness import Bar, Measurement, spread
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Child

NUM_STREAMS = 64
# A stream at 40 tokens per second, as readers of chats see; all of them are about 2,600 messages per second.
PACED_RATE = 40.0
BAR_MICROSECONDS = 160.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one round."""

    microseconds: float
    messages_per_second: float


def start(rate: float, *flags: str) -> tuple[Child, Child, str]:
    """Starts the fake service and a gateway. Returns both, and the gateway's host:port. `flags`: of the service."""
    service = Child("service", ["tests.measure.gateway.service", "--rate", str(rate), *flags])
    address = service.wait_line(r"listening on (\S+)").group(1)
    gateway = Child(
        "gateway", ["tandem_client.gateway", "--listen", "127.0.0.1:0", "--address", address]
    )  # fmt: skip
    url = gateway.wait_line(r"gateway listening on http://(\S+)").group(1)
    return service, gateway, url


async def _round(url: str, gateway: Child, tokens: int) -> Cost:
    body = json.dumps({"prompt": "a", "model": "benchmark", "max_tokens": tokens, "stream": True}).encode()
    before, began = cpu_seconds(gateway.pid), time.perf_counter()
    counts = await asyncio.gather(*(read_stream(url, body) for _ in range(NUM_STREAMS)))
    seconds, cpu = time.perf_counter() - began, cpu_seconds(gateway.pid) - before
    messages = sum(counts)
    assert messages == NUM_STREAMS * tokens, f"{messages} messages with a token; {NUM_STREAMS * tokens} are due"
    return Cost(microseconds=1e6 * cpu / messages, messages_per_second=messages / seconds)


def measure(measurement: Measurement, rate: float, *, rounds: int, tokens: int) -> None:
    """Runs the rounds at a rate; 0 is full speed. Prints figures and the bar."""
    service, gateway, url = start(rate)
    try:
        asyncio.run(_round(url, gateway, 20))
        costs = [asyncio.run(_round(url, gateway, tokens)) for _ in range(rounds)]
    finally:
        gateway.kill()
        service.kill()
    each = spread([cost.microseconds for cost in costs])
    name = "full speed" if not rate else f"{rate:g} tokens/s a stream"
    measurement.line(
        {
            "rate": name,
            "streams": NUM_STREAMS,
            "cpu_us_per_message": each,
            "messages_per_second": median(cost.messages_per_second for cost in costs),
        }
    )
    measurement.bar(Bar(name=f"CPU us per message, {name}", value=each["median"], limit=BAR_MICROSECONDS))
