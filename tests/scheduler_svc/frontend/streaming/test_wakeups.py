"""When handlers see new tokens, on an event loop with a clock that stands still until nothing is ready."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate, Places
from scheduler_svc.frontend.streaming.stream import RequestStream, StreamLimits
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from tests.scheduler_svc.frontend.virtual_loop import in_virtual_time

STEP_SECONDS = 0.001


class Table:
    """A stream table with open streams of one sample each, and a reader per stream that notes when it takes what."""

    def __init__(self, num_streams: int, **limits: Any) -> None:
        self.sent: list[frontend_pb2.FrontendToCore] = []
        self.table = StreamTable(self._send, StreamLimits(**limits), Places(Bound()), Gate())
        self.arrived: dict[tuple[int, int], float] = {}
        # Per stream: time and tokens of each take.
        self.taken: dict[int, list[tuple[float, list[int]]]] = {}
        self.streams: list[RequestStream] = []
        self.tasks: list[asyncio.Task[None]] = []
        for _ in range(num_streams):
            stream = self.table.open()
            self.table.submit(stream, frontend_pb2.Submit(num_samples=1, max_new_tokens=1000, request_id="r"))
            self.streams.append(stream)
            self.taken[stream.samples[0].id] = []
            self.tasks.append(asyncio.create_task(self._read(stream)))

    def _send(self, message: frontend_pb2.FrontendToCore) -> bool:
        self.sent.append(message)
        return True

    async def _read(self, stream: RequestStream) -> None:
        sample = stream.samples[0]
        while True:
            await stream.changed()
            if tokens := sample.take():
                self.taken[sample.id].append((asyncio.get_running_loop().time(), tokens))
            if sample.end is not None or stream.failure is not None:
                return

    def step(self, ids: list[int], offset: int, *ends: int) -> None:
        """A step's output with the token `offset` of each stream."""
        now = asyncio.get_running_loop().time()
        self.arrived.update(((stream, offset), now) for stream in ids)
        output = frontend_pb2.StepOutput(
            streams=np.array(ids, "<u8").tobytes(),
            offsets=np.full(len(ids), offset, "<i4").tobytes(),
            tokens=np.full(len(ids), offset, "<i4").tobytes(),
            ends=[frontend_pb2.End(stream=stream) for stream in ends],
        )
        self.table.step_output(output)

    def waits(self) -> list[float]:
        """How long each taken token waited."""
        return [
            at - self.arrived[stream, token]
            for stream, takes in self.taken.items()
            for at, tokens in takes
            for token in tokens
        ]

    def tokens(self, stream: int) -> list[int]:
        return [token for _, tokens in self.taken[stream] for token in tokens]

    def end(self) -> None:
        for task in self.tasks:
            task.cancel()


async def _busy(table: Table, ids: list[int], num_steps: int, each: Callable[[int], None] = lambda _: None) -> None:
    for offset in range(num_steps):
        table.step(ids, offset)
        each(offset)
        await asyncio.sleep(STEP_SECONDS)
    await asyncio.sleep(0.05)


@in_virtual_time
async def test_under_load_every_token_is_passed_on_in_order_within_20_ms() -> None:
    table = Table(64)
    ids = list(table.taken)
    await _busy(table, ids, 300)
    table.end()
    for stream in ids:
        assert table.tokens(stream) == list(range(300))
    assert max(table.waits()) <= 0.02
    # The load is known after a tenth of a second.
    late = [len(tokens) for takes in table.taken.values() for at, tokens in takes if 0.15 < at < 0.3]
    assert sum(late) / len(late) > 10


@in_virtual_time
async def test_under_load_first_tokens_do_not_wait() -> None:
    table = Table(65)
    *ids, new = table.taken

    def begin(offset: int) -> None:
        if offset == 200:
            table.step([new], 0)

    await _busy(table, ids, 300, begin)
    table.end()
    assert [at - table.arrived[new, 0] for at, _ in table.taken[new]] == [0.0]


@in_virtual_time
async def test_under_load_an_end_brings_all_tokens_at_once() -> None:
    table = Table(64)
    ids = list(table.taken)

    def end(offset: int) -> None:
        if offset == 200:
            table.step([ids[0]], 201, ids[0])

    async def steps() -> None:
        for offset in range(300):
            table.step(ids if offset <= 200 else ids[1:], offset)
            end(offset)
            await asyncio.sleep(STEP_SECONDS)

    await steps()
    table.end()
    assert table.tokens(ids[0]) == list(range(202))
    at, _ = table.taken[ids[0]][-1]
    assert at == table.arrived[ids[0], 201]


@in_virtual_time
async def test_tokens_that_are_kept_reach_their_stream_before_the_core_is_lost() -> None:
    table = Table(64)
    ids = list(table.taken)
    for offset in range(200):
        table.step(ids, offset)
        await asyncio.sleep(STEP_SECONDS)
    table.step(ids, 200)
    table.table.fail_all(lambda: status.not_ready("gone"))
    await asyncio.gather(*table.tasks)
    for stream in ids:
        assert table.tokens(stream) == list(range(201))


@in_virtual_time
async def test_a_closed_stream_gets_no_kept_tokens() -> None:
    table = Table(64)
    ids = list(table.taken)

    def close(offset: int) -> None:
        if offset == 200:
            table.table.close(table.streams[0])

    await _busy(table, ids, 300, close)
    table.end()
    assert len(table.tokens(ids[0])) <= 201
    assert table.tokens(ids[1]) == list(range(300))


@in_virtual_time
async def test_a_gap_in_kept_tokens_fails_only_its_stream() -> None:
    table = Table(64)
    ids = list(table.taken)
    for offset in range(300):
        table.step(ids if offset != 250 else ids[1:], offset)
        await asyncio.sleep(STEP_SECONDS)
    await asyncio.sleep(0.05)
    table.end()
    broken = table.streams[0]
    assert broken.failure is not None
    assert "from 25" in broken.failure.message
    tokens = table.tokens(ids[0])
    assert tokens == list(range(len(tokens)))
    assert 200 < len(tokens) <= 250
    assert all(stream.failure is None for stream in table.streams[1:])
    assert table.tokens(ids[1]) == list(range(300))


@in_virtual_time
async def test_without_load_no_token_waits() -> None:
    table = Table(4)
    ids = list(table.taken)
    for offset in range(40):
        table.step(ids, offset)
        await asyncio.sleep(0.01)
    table.end()
    assert max(table.waits()) == 0.0
    assert {len(tokens) for takes in table.taken.values() for _, tokens in takes} == {1}
