"""One client of two services: streams of both equal the oracle, and those of a cell that died are asked for again."""

import random
from collections.abc import Iterator

import pytest

from tandem_client import Client
from tandem_client.cells.router import Router
from tandem_client.errors import Unavailable
from tandem_client.sync_stream import GenerateStream
from tandem_client.wire.routing import affinity_of
from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.streams import Caller
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask

SHAPE = ("--page-size", "4", "--num-pages", "512", "--max-rows", "16", "--max-length", "1024", "--step-ms", "2")


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    with Rig() as first, Rig() as second:
        yield [first, second]


def serve(rigs: list[Rig]) -> tuple[list[SchedulerProcess], list[Caller]]:
    workers = [rig.worker(*SHAPE) for rig in rigs]
    schedulers = [rig.launch_scheduler() for rig in rigs]
    assert len(workers) == len(schedulers)
    callers = [rig.caller(scheduler) for rig, scheduler in zip(rigs, schedulers, strict=True)]
    for caller in callers:
        caller.wait_serving()
    return schedulers, callers


def asks_of(router: Router, cell: int, count: int) -> list[Ask]:
    """Requests whose first choice is this cell."""
    rng = random.Random(cell)
    found: list[Ask] = []
    while len(found) < count:
        ask = Ask(prompt=tuple(rng.choices(range(200), k=30)), max_new_tokens=80)
        if router.order(affinity_of(ask.request()))[0] == cell:
            found.append(ask)
    return found


def send(client: Client, ask: Ask, **options: bool) -> GenerateStream:
    return client.generate(
        list(ask.prompt), max_new_tokens=ask.max_new_tokens, temperature=0.0, ignore_eos=True, **options
    )


def check(ask: Ask, stream: GenerateStream) -> None:
    for _ in stream:
        pass
    assert list(stream.samples[0].token_ids) == ask.expected().tokens


def test_a_cell_that_dies_takes_its_streams_and_no_others(rigs: list[Rig]) -> None:
    schedulers, callers = serve(rigs)
    router = Router([caller.address for caller in callers])
    asks = [ask for cell in (0, 1) for ask in asks_of(router, cell, 6)]
    homes = [0] * 6 + [1] * 6
    with Client([caller.address for caller in callers]) as client:
        client.wait_ready(TIMEOUT_SECONDS)
        streams = [send(client, ask) for ask in asks]
        for stream in streams:
            next(stream)
        running = [caller.load().running for caller in callers]
        assert running == [6, 6]
        schedulers[0].kill()
        for home, ask, stream in zip(homes, asks, streams, strict=True):
            if home == 1:
                check(ask, stream)
            else:
                with pytest.raises(Unavailable):
                    check(ask, stream)
        # Asked again, all are answered by the cell that is left, at the first try.
        for ask in asks:
            check(ask, send(client, ask))
        callers[1].wait_idle()


def test_equal_beginnings_hit_the_cache_of_one_cell(rigs: list[Rig]) -> None:
    _, callers = serve(rigs)
    shared = tuple(range(1, 257))
    with Client([caller.address for caller in callers]) as client:
        hits: list[int] = []
        for last in range(4):
            ask = Ask(prompt=(*shared, 100 + last), max_new_tokens=4)
            stream = send(client, ask)
            check(ask, stream)
            assert stream.summary is not None
            hits.append(stream.summary.usage.cached_prompt_tokens)
        assert hits == [0, 256, 256, 256]
