"""A caller with a token, without and with an attack by callers that have none: gaps of its streams, and its new calls.

Real processes over TLS at a public address: a fake service that knows one token, the gateway, and the attacker. Rounds
without and with the attack take turns.
"""

import asyncio
import json
import ssl
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from tests.measure import call
from tests.measure.gateway.attacker import ADDRESSES, BODIES, HANDSHAKES, SLOW_BODIES
from tests.measure.gateway.cpu import started
from tests.measure.gateway.http_stream import TOKEN_EVENT
from tests.measure.harness import Bar, Measurement, in_ms, in_turns
from tests.measure.machine import cpu_seconds
from tests.rigs.authorities import Authority
from tests.rigs.processes import Child

TOKEN = "tandem_benchmark"
NUM_STREAMS, RATE = 4, 100.0
SECONDS, CALLS_PER_SECOND = 8.0, 5.0
GAP_BAR_MS, CALL_BAR_MS = 25.0, 100.0


class _Caller:
    """The caller with the token."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=str(certificate))
        self.gaps, self.calls = list[float](), list[float]()

    async def _open(self, num_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context, limit=1 << 20)
        body = json.dumps({"prompt": "a", "model": "m", "max_tokens": num_tokens, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        return reader, writer

    async def stream(self) -> None:
        """Reads a stream of events, and notes the time between two of them."""
        reader, writer = await self._open(1_000_000)
        try:
            await reader.readuntil(TOKEN_EVENT)
            before = time.perf_counter()
            while True:
                await reader.readuntil(TOKEN_EVENT)
                now = time.perf_counter()
                self.gaps.append(now - before)
                before = now
        finally:
            writer.transport.abort()

    async def call(self) -> None:
        """Makes a call on a new connection to its first event."""
        while True:
            began = time.perf_counter()
            reader, writer = await self._open(4)
            await reader.readuntil(TOKEN_EVENT)
            self.calls.append(time.perf_counter() - began)
            writer.transport.abort()
            await asyncio.sleep(1 / CALLS_PER_SECOND)

    async def run(self) -> None:
        works = [asyncio.create_task(self.stream()) for _ in range(NUM_STREAMS)]
        works.append(asyncio.create_task(self.call()))
        await asyncio.sleep(SECONDS)
        for work in works:
            assert not work.done(), work.exception()
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


def _round(port: int, certificate: Path, gateway: Child, *, attacked: bool) -> dict[str, float]:
    caller, attacker, before = _Caller(port, certificate), None, cpu_seconds(gateway.pid)
    if attacked:
        attacker = Child("attacker", call.words("gateway.attacker.attack", port=port, seconds=SECONDS + 2))
        attacker.wait_line("attack begins")
        # The slow bodies are there.
        time.sleep(1.0)
    asyncio.run(caller.run())
    gaps, calls = map(in_ms, (caller.gaps, caller.calls))
    found = {"gap_p50": gaps["p50"], "gap_p99": gaps["p99"], "call_p50": calls["p50"], "call_p99": calls["p99"]}
    found["gateway_cpu"] = (cpu_seconds(gateway.pid) - before) / SECONDS
    if attacker is not None:
        found["attacker_cpu"] = call.answer(attacker, 60.0)
    return found


def measure(measurement: Measurement, *, rounds: int) -> None:
    """Prints medians of the rounds in milliseconds, the parts of a core that were used, and the bars."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Authority(Path(folder)).issue("gateway", "IP:127.0.0.1")
        certificate = Path(folder) / "authority.pem"
        flags = ["--listen", "0.0.0.0:0", "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
        with started(RATE, *flags, token=TOKEN) as (_, url, gateway):
            one_round = partial(_round, int(url.rpartition(":")[2]), certificate, gateway)
            one_round(attacked=False)
            found = in_turns(
                rounds, {"quiet": partial(one_round, attacked=False), "loud": partial(one_round, attacked=True)}
            )
    alone, beside = ({name: median(each[name] for each in of) for name in of[0]} for of in found.values())
    measurement.line(
        {
            "attack": f"{BODIES:g} bodies of 4 MiB/s, {HANDSHAKES:g} half-open handshakes/s, "
            f"{SLOW_BODIES} slow bodies of each of {len(ADDRESSES)} addresses",
            "streams": NUM_STREAMS,
            "tokens_per_second": RATE,
            "alone": alone,
            "attacked": beside,
        }
    )
    measurement.bar(
        Bar(name="p99 of gaps in ms, attacked", value=beside["gap_p99"], limit=GAP_BAR_MS),
        Bar(name="p99 of new calls in ms, attacked", value=beside["call_p99"], limit=CALL_BAR_MS),
    )
