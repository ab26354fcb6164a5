"""Rows that start with pages of other rows, full or filled in the same plan, match rows that computed everything."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.rig import Recording, Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS

CHOSEN = [spec for spec in SPECS if spec.dtype == torch.float32 and spec.page_size < 128 and spec.head_dim < 256]


@pytest.fixture(params=CHOSEN, ids=str)
def rig(request: pytest.FixtureRequest, rig_of: Callable[[RigSpec], Rig]) -> Iterator[Rig]:
    rig = rig_of(request.param)
    yield rig
    rig.forget()


def add_hit(core: TinyCore, rig: Rig, row: int, shared: list[int], tokens: list[int], num_own: int, seed: int) -> None:
    """A sequence in `row` that begins with `shared` pages of `tokens` and continues with `num_own` other tokens."""
    known = len(shared) * rig.geometry.page_size
    core.add(row, [*tokens[:known], *rig.prompt(num_own, seed)], shared=shared, position=known)


def test_prefix_hits_of_any_number_of_pages_match(rig: Rig) -> None:
    """One page to three, the rest a chunk that ends inside a page or at its end, or only the last known token."""
    page_size = rig.geometry.page_size
    tokens = rig.prompt(3 * page_size + 5, seed=1)
    for num_hit in (1, 2, 3):
        core, recording = rig.core(), Recording()
        first = core.add(1, tokens)
        rig.step(core, chunks={1: len(tokens)})
        shared = first.pages[:num_hit]
        add_hit(core, rig, 2, shared, tokens, page_size, seed=2)
        rig.step(core, recording, chunks={2: page_size}, decode=[1])
        # Only the last known token is computed, by a decode row from the start.
        add_hit(core, rig, 3, shared, tokens, 1, seed=num_hit)
        rig.step(core, recording, decode=[3, 1, 2])
        for _ in range(2):
            rig.step(core, recording, decode=[2, 3, 1])
        rig.check(core, recording)


def test_pages_are_shared_in_the_plan_that_computes_them(rig: Rig) -> None:
    """Rows 2 and 3 share what row 1 computes in the same step, by a chunk and as a decode row: layers write, then
    attend."""
    page_size = rig.geometry.page_size
    tokens = rig.prompt(2 * page_size + 3, seed=4)
    core, recording = rig.core(), Recording()
    first = core.add(1, tokens)
    add_hit(core, rig, 2, first.pages[:1], tokens, page_size + 3, seed=5)
    add_hit(core, rig, 3, first.pages[:2], tokens, 1, seed=6)
    rig.step(core, recording, chunks={2: page_size + 3, 1: len(tokens)}, decode=[3])
    for _ in range(2):
        rig.step(core, recording, decode=[3, 1, 2])
    rig.check(core, recording)


def test_a_page_is_shared_that_another_row_completes_in_the_same_plan(rig: Rig) -> None:
    """The previous plan computed half of the page."""
    page_size = rig.geometry.page_size
    tokens = rig.prompt(2 * page_size, seed=7)
    core, recording = rig.core(), Recording()
    first = core.add(1, tokens)
    rig.step(core, recording, chunks={1: page_size + page_size // 2})
    add_hit(core, rig, 2, first.pages[:2], tokens, 7, seed=8)
    rig.step(core, recording, chunks={1: page_size // 2, 2: 7})
    rig.step(core, recording, decode=[1, 2])
    rig.check(core, recording)


def test_pages_of_an_ended_sequence_are_hit(rig: Rig) -> None:
    """The row runs another sequence meanwhile, and the ended one's other pages are not finite."""
    page_size = rig.geometry.page_size
    tokens = rig.prompt(2 * page_size + 4, seed=9)
    core, recording = rig.core(), Recording()
    ended = core.add(1, tokens)
    rig.step(core, chunks={1: len(tokens)})
    rig.spoil(ended.pages[2])
    add_hit(core, rig, 1, ended.pages[:2], tokens, 3, seed=10)
    add_hit(core, rig, 3, ended.pages[:1], tokens, page_size, seed=11)
    rig.step(core, recording, chunks={3: page_size, 1: 3})
    rig.step(core, recording, decode=[1, 3])
    rig.check(core, recording)
