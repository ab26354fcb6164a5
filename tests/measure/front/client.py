"""The benchmark's callers as a process of their own.

`stream` reads completions with the AsyncClient, all at once, and writes one row per message to a .npy file: stream,
time (CLOCK_MONOTONIC), first token, number of tokens. Token -1 stands for the request. It prints `streaming` when every
stream has its first token, and `over` some seconds later; then it closes the streams and checks every token that it
read. `hold` opens calls, reads from each up to its metadata or its first delta, prints `holding`, and keeps them open
without reading on.
"""

import asyncio
import gc
import time
from typing import Any

import grpc.aio
import numpy as np
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

from tandem_client import AsyncClient, TlsSettings
from tandem_client.connection import channel_options
from tests.rigs.instant_worker import token

NUM_PROMPT = 8
# Calls that are opened at once by `hold`, so that no deadline of the service passes while they queue.
_OPENING = 64


def prompt(number: int) -> list[int]:
    """A prompt that holds the request's number for the instant worker."""
    return [number // 256, number % 256, *([32] * (NUM_PROMPT - 2))]


class Streams:
    """All streams of `stream` and what was noted of them."""

    def __init__(self, client: AsyncClient, num_streams: int, num_tokens: int) -> None:
        self.rows: list[tuple[int, float, int, int]] = []
        self.num_wrong = 0
        self.streaming = asyncio.Event()
        self._client = client
        self._num_pending = num_streams
        self._num_tokens = num_tokens

    async def read(self, number: int) -> None:
        """Reads one completion until the task is cancelled, and checks it."""
        rows, now = self.rows, time.monotonic
        rows.append((number, now(), -1, 0))
        options: Any = {"max_new_tokens": self._num_tokens, "temperature": 0.0, "ignore_eos": True}
        stream = self._client.generate(prompt(number), **options)
        num_read = 0
        try:
            async for delta in stream:
                count = len(delta.token_ids)
                rows.append((number, now(), num_read, count))
                if not num_read:
                    self._begin()
                num_read += count
        except asyncio.CancelledError:
            [sample] = stream.samples
            expected = [token(number, NUM_PROMPT + idx) for idx in range(num_read)]
            is_right = sample.token_ids == expected and sample.text == bytes(expected).decode()
            self.num_wrong += not is_right
        else:
            raise AssertionError(f"stream {number} ended by itself after {num_read} tokens: more tokens are needed")

    def _begin(self) -> None:
        self._num_pending -= 1
        if not self._num_pending:
            self.streaming.set()


async def stream(
    address: str, streams: int, tokens: int, seconds: float, file: str, token: str | None, tls_ca: str | None
) -> dict[str, float]:
    """Reads all completions for a time. Returns the number of wrong streams, and when the time began and was over."""
    # The rows are kept, so the collector would go through them again and again.
    gc.freeze()
    async with AsyncClient(address, token=token, tls=TlsSettings(ca=tls_ca) if tls_ca else None) as client:
        await client.wait_ready(30)
        every = Streams(client, streams, tokens)
        tasks = [asyncio.create_task(every.read(number)) for number in range(streams)]
        await asyncio.wait([*tasks, asyncio.create_task(every.streaming.wait())], return_when=asyncio.FIRST_COMPLETED)
        begun = time.monotonic()
        print("streaming", flush=True)
        await asyncio.sleep(seconds)
        over = time.monotonic()
        print("over", flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
    np.save(file, np.array(every.rows))
    return {"wrong": every.num_wrong, "begun": begun, "over": over}


async def hold(address: str, streams: int, tokens: int, until: str) -> None:
    """Opens the calls and keeps them open. `until`: metadata or delta."""
    opening = asyncio.Semaphore(_OPENING)
    async with grpc.aio.insecure_channel(address, options=channel_options(address, proxy=False)) as channel:
        generate: Any = inference_pb2_grpc.InferenceServiceStub(channel).Generate

        async def open_call(number: int) -> Any:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(number % 4096)))
            request.stop.max_new_tokens, request.stop.ignore_eos = tokens, True
            async with opening:
                call = generate(request)
                await call.initial_metadata()
            return call

        async def read_delta(call: Any) -> None:
            while (await call.read()).WhichOneof("event") != "delta":
                pass

        calls = await asyncio.gather(*(open_call(number) for number in range(streams)))
        if until == "delta":
            await asyncio.gather(*(read_delta(call) for call in calls))
        print("holding", flush=True)
        await asyncio.Event().wait()
