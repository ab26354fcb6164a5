"""When handlers see new tokens, on an event loop with a clock that stands still until nothing is ready."""

import asyncio
from collections.abc import Callable
from typing import Any

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate, Places
from scheduler_svc.frontend.streaming.stream import RequestStream, StreamLimits
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from tests.scheduler_svc.frontend.fake_core import step_output
from tests.scheduler_svc.frontend.virtual_loop import in_virtual_time

STEP_SECONDS = 0.001


class Table:
    """A stream table with open streams of one sample each, and a reader per stream that notes when it takes what."""

    def __init__(self, num_streams: int, **limits: Any) -> None:
        self.sent: list[frontend_pb2.FrontendToCore] = []
        self.table = StreamTable(self._send, StreamLimits(**limits), Places(Bound()), Gate(), set())
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
        at = [offset] * len(ids)
        self.table.step_output(step_output(ids, at, at, ends=[frontend_pb2.End(stream=stream) for stream in ends]))

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


def all_of(table: Table, _: int) -> list[int]:
    return list(table.taken)


async def loaded(num_steps: int = 300, each: Callable[[Table, int], list[int]] = all_of) -> Table:
    """A table under load, after steps of which each gives a token to the streams that `each` returns."""
    table = Table(64)
    for offset in range(num_steps):
        table.step(each(table, offset), offset)
        await asyncio.sleep(STEP_SECONDS)
    return table


@in_virtual_time
async def test_under_load_every_token_is_passed_on_in_order_within_20_ms() -> None:
    table = await loaded()
    await asyncio.sleep(0.05)
    for stream in table.taken:
        assert table.tokens(stream) == list(range(300))
    assert max(table.waits()) <= 0.02
    # The load is known after a tenth of a second.
    late = [len(tokens) for takes in table.taken.values() for at, tokens in takes if 0.15 < at < 0.3]
    assert sum(late) / len(late) > 10
    table.end()


@in_virtual_time
async def test_under_load_first_tokens_do_not_wait() -> None:
    def begin(table: Table, offset: int) -> list[int]:
        *ids, new = table.taken
        if offset == 200:
            table.step([new], 0)
        return ids

    table = await loaded(each=begin)
    new = list(table.taken)[-1]
    assert [at - table.arrived[new, 0] for at, _ in table.taken[new]] == [0.0]
    table.end()


@in_virtual_time
async def test_under_load_an_end_brings_all_tokens_at_once() -> None:
    def end(table: Table, offset: int) -> list[int]:
        first, *others = table.taken
        if offset == 201:
            table.step([first], 201, first)
        return [first, *others] if offset <= 200 else others

    table = await loaded(each=end)
    first = next(iter(table.taken))
    assert table.tokens(first) == list(range(202))
    at, _ = table.taken[first][-1]
    assert at == table.arrived[first, 201]
    table.end()


@in_virtual_time
async def test_tokens_that_are_kept_reach_their_stream_before_the_core_is_lost() -> None:
    table = await loaded(200)
    table.step(list(table.taken), 200)
    table.table.fail_all(lambda: status.not_ready("gone"))
    await asyncio.gather(*table.tasks)
    for stream in table.taken:
        assert table.tokens(stream) == list(range(201))


@in_virtual_time
async def test_a_closed_stream_gets_no_kept_tokens() -> None:
    def close(table: Table, offset: int) -> list[int]:
        if offset == 201:
            table.table.close(table.streams[0])
        return list(table.taken)

    table = await loaded(each=close)
    await asyncio.sleep(0.05)
    first, second, *_ = table.taken
    assert len(table.tokens(first)) <= 201
    assert table.tokens(second) == list(range(300))
    table.end()


@in_virtual_time
async def test_a_gap_in_kept_tokens_fails_only_its_stream() -> None:
    table = await loaded(each=lambda table, offset: list(table.taken)[offset == 250 :])
    await asyncio.sleep(0.05)
    broken, *others = table.streams
    assert broken.failure is not None and "from 25" in broken.failure.message
    tokens = table.tokens(broken.samples[0].id)
    assert tokens == list(range(len(tokens))) and 200 < len(tokens) <= 250
    assert all(stream.failure is None for stream in others)
    assert table.tokens(others[0].samples[0].id) == list(range(300))
    table.end()


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
