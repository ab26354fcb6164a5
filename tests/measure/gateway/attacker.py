"""Callers without a token, as a process of their own. Only for 127.0.0.1.

From each of several addresses of this machine, over TLS: bodies of 4 MiB, handshakes that stop after their first
message, and bodies of which a byte comes each second.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# Of all addresses together, per second; and of each address at once.
BODIES, HANDSHAKES, SLOW_BODIES = 20.0, 200.0, 100
BODY = b'{"prompt": "' + b"a" * (4 * 2**20 - 14) + b'"}'
_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer tandem_wrong%d\r\n"
    "content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
_SECONDS = 10.0


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def first_message() -> bytes:
    """The first bytes of a client's handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _context().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


class Attacker:
    def __init__(self, port: int) -> None:
        self._target, self._context, self._hello = ("127.0.0.1", port), _context(), first_message()
        self._number = 0

    async def run(self, seconds: float) -> None:
        works = [
            self._often(BODIES, self._body),
            self._often(HANDSHAKES, self._half_open),
            *(self._again(address) for address in ADDRESSES for _ in range(SLOW_BODIES)),
        ]
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _often(self, rate: float, act: Callable[[str], Awaitable[None]]) -> None:
        running, loop = set[asyncio.Task[None]](), asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                for address in ADDRESSES:
                    task = asyncio.create_task(self._tried(act, address))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    due = max(due + 1 / rate, loop.time() - 1)
                    await asyncio.sleep(max(0.0, due - loop.time()))
        finally:
            for task in running:
                task.cancel()

    async def _again(self, address: str) -> None:
        while True:
            await self._tried(self._slow_body, address)
            # An address that is refused tries again.
            await asyncio.sleep(0.5)

    async def _tried(self, act: Callable[[str], Awaitable[None]], address: str) -> None:
        with contextlib.suppress(OSError, EOFError):
            async with asyncio.timeout(_SECONDS):
                await act(address)

    async def _request(self, address: str, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._target, ssl=self._context, local_addr=(address, 0))
        self._number += 1
        writer.write((_HEAD % (self._number, size)).encode())
        return reader, writer

    async def _body(self, address: str) -> None:
        reader, writer = await self._request(address, len(BODY))
        try:
            writer.write(BODY)
            await writer.drain()
            await reader.readuntil(b"\r\n")
        finally:
            writer.transport.abort()

    async def _slow_body(self, address: str) -> None:
        reader, writer = await self._request(address, len(BODY))
        try:
            reading = asyncio.ensure_future(reader.readuntil(b"\r\n"))
            while not reading.done():
                writer.write(b"{")
                await asyncio.wait([reading], timeout=1.0)
            reading.result()
        finally:
            writer.transport.abort()

    async def _half_open(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.bind((address, 0))
            await loop.sock_connect(sock, self._target)
            await loop.sock_sendall(sock, self._hello)
            while await loop.sock_recv(sock, 65_536):
                pass


async def attack(port: int, seconds: float) -> float:
    """Attacks for so long. Returns the share of a core that it took."""
    began, cpu = time.monotonic(), time.process_time()
    print("attack begins", flush=True)
    await Attacker(port).run(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - began)
