"""Page copies run beside computation, and an event orders every two accesses to the same memory."""

from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gpu_worker.attention import host_pages
from gpu_worker.attention.host_pages import HostPages, Passing, streams_of
from gpu_worker.attention.kv_cache import KvCache
from tests.gpu_worker.attention.small_layers import KIND, layers_of
from tests.gpu_worker.attention.stream_checker import COMPUTE, COPY, CheckedStreams

NUM_PAGES, NUM_SLOTS, NUM_STEPS = 16, 9, 12
LAYERS = layers_of(KIND, KIND)
# For saves and loads, two buffers each; a buffer has two events.
PASSING = Passing(num_buffers=2, pages_at_once=2)
NUM_EVENTS = 8


def run_plans(streams: CheckedStreams) -> None:
    """Plans with up to nine saves and loads, in worker.proto's order; then each step writes to every page."""
    cpu, draw = torch.device("cpu"), np.random.default_rng(1)
    cache = KvCache(LAYERS, num_pages=NUM_PAGES, page_size=4, dtype=torch.float32, device=cpu)
    # Its memory lives longer than any use, so it is allocated outside.
    host = HostPages(cache, NUM_SLOTS, streams=streams, passing=PASSING)
    with streams:
        for _ in range(NUM_STEPS):
            saves, loads = (int(count) for count in draw.integers(0, NUM_SLOTS + 1, 2))
            saved_slots, loaded_slots = (draw.permutation(NUM_SLOTS)[:count] for count in (saves, loads))
            saved, loaded = (torch.from_numpy(1 + draw.permutation(NUM_PAGES - 1)[:count]) for count in (saves, loads))
            num_fetched = host.fetch(loaded_slots, saved_slots)
            host.save(saved, saved_slots)
            cache.zero_pages(saved)
            host.load(loaded, loaded_slots, num_fetched)
            for pool in cache.pools:
                pool.add_(1)


def test_every_two_accesses_to_the_same_memory_have_an_order() -> None:
    streams = CheckedStreams()
    run_plans(streams)
    assert streams.disordered == []
    assert streams.used == {COMPUTE, COPY}
    assert streams.num_events == NUM_EVENTS


@pytest.mark.parametrize("call", ["record", "wait"])
@pytest.mark.parametrize("number", range(NUM_EVENTS))
def test_no_event_can_be_left_out(number: int, call: str) -> None:
    """The checker sees the absence of each one, so it would see the absence of an event in the code."""
    streams = CheckedStreams(without=(number, call))
    run_plans(streams)
    assert streams.disordered


def test_memory_of_one_stream_may_not_be_used_on_the_other() -> None:
    """A temporary tensor could be freed, and its memory reused, while the copy still reads it."""
    streams = CheckedStreams()
    with streams:
        made = torch.zeros(4)
        event = streams.event()
        event.record()
        with streams.copying():
            event.wait()
            made.add_(1)
    assert "uses memory that another stream allocated" in streams.disordered[0]


def test_a_gpu_has_a_stream_of_its_own_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = [COMPUTE]

    class Event:
        """Notes the calls of `torch.cuda.Event`, and on which stream."""

        def record(self) -> None:
            log.append(f"record on {current[-1]}")

        def wait(self) -> None:
            log.append(f"wait on {current[-1]}")

    class Entered(nullcontext[None]):
        def __enter__(self) -> None:
            current.append(COPY)

        def __exit__(self, *_: object) -> None:
            current.pop()

    stream_on = Mock(return_value="the copy stream")

    def entered(stream: str) -> Entered:
        assert stream == "the copy stream"
        return Entered()

    monkeypatch.setattr(host_pages.torch.cuda, "Stream", stream_on)
    monkeypatch.setattr(host_pages.torch.cuda, "stream", entered)
    monkeypatch.setattr(host_pages.torch.cuda, "Event", Event)
    streams = streams_of(torch.device("cuda", 0))
    event = streams.event()
    event.record()
    with streams.copying():
        event.wait()
    event.wait()
    stream_on.assert_called_once_with(torch.device("cuda", 0))
    assert log == ["record on compute", "wait on copy", "wait on compute"]
