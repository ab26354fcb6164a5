"""Requests that reach the maximum length: they end with CONTEXT_FULL, unless something else ends them there."""

import pytest

from scheduler_svc.core.messages import effects as fx
from tests.rigs.executor import Shape
from tests.rigs.oracle import complete
from tests.scheduler_svc.core.world import World

SHAPE = Shape(page_size=4, num_pages=16, max_length=16)
TEN = list(range(10))
TOKENS = complete(TEN, max_new_tokens=6, vocab=SHAPE.sampled_vocab).tokens


@pytest.mark.parametrize(
    ("max_new_tokens", "reason"),
    [
        (5, fx.EndReason.LENGTH),
        (6, fx.EndReason.LENGTH),
        (7, fx.EndReason.CONTEXT_FULL),
        (1000, fx.EndReason.CONTEXT_FULL),
    ],
)
def test_output_beyond_the_last_position_is_cut(world: World, max_new_tokens: int, reason: fx.EndReason) -> None:
    stream = world.submit(TEN, max_new_tokens=max_new_tokens, ignore_eos=True)
    world.finish()
    end = world.end(stream)
    assert (end.reason, end.stop_token_id) == (reason, None)
    assert world.streams[stream].tokens == list(TOKENS[:max_new_tokens])
    # The core knows the length beforehand, so no token is computed in vain.
    assert end.stats.discarded_tokens == 0


def test_a_stop_token_at_the_last_position_ends_with_stop_token() -> None:
    assert TOKENS[-1] not in TOKENS[:-1]
    world = World(SHAPE)
    stream = world.submit(TEN, max_new_tokens=50, ignore_eos=True, stop_token_ids=(TOKENS[-1],))
    world.finish()
    assert (world.end(stream).reason, world.end(stream).stop_token_id) == (fx.EndReason.STOP_TOKEN, TOKENS[-1])


@pytest.mark.parametrize(("length", "message"), [(15, None), (16, "one output token make 17 tokens; the limit is 16")])
def test_a_prompt_needs_room_for_one_output_token(world: World, length: int, message: str | None) -> None:
    stream = world.submit(list(range(length)), max_new_tokens=50, ignore_eos=True)
    world.run()
    rejected = world.streams[stream].rejected
    if message is None:
        assert (world.end(stream).reason, len(world.streams[stream].tokens)) == (fx.EndReason.CONTEXT_FULL, 1)
    else:
        assert rejected is not None
        assert rejected.message.endswith(message)


def test_every_sample_is_cut_and_needs_only_the_pages_of_the_cut_length() -> None:
    # Fifteen positions fill the pool's four pages. The tokens requested beyond them need no pages.
    world = World(Shape(page_size=4, num_pages=5, max_length=16))
    world.submit(TEN, max_new_tokens=1000, num_samples=2, temperature=1.0, ignore_eos=True)
    world.finish()
    assert [world.end(stream).reason for stream in (1, 2)] == [fx.EndReason.CONTEXT_FULL] * 2
