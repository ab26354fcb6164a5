"""Page orders of plans on the runner: forks, pages swapped out and in, their order within a plan."""

import random
from collections.abc import Callable, Iterable
from itertools import chain

import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from tests.gpu_worker.plans import Moves, TinyCore
from tests.gpu_worker.rig import Recording, Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS

# Pages of 16 and 64, groups of 1, 2, 3 and 7 query heads, layers that slide, padded heads, sinks, sink tokens.
CHOSEN = [spec for spec in SPECS if spec.dtype == torch.float32 and spec.page_size < 128 and spec.head_dim < 256]


@pytest.fixture(params=CHOSEN, ids=str)
def rig(request: pytest.FixtureRequest, rig_of: Callable[[RigSpec], Rig]) -> Rig:
    rig = rig_of(request.param)
    # Tests that ran before on the same rig may have left nonfinite values in its pool.
    rig.runner.on_device.zero_pool()
    return rig


@pytest.fixture
def plain_rig(rig_of: Callable[[RigSpec], Rig]) -> Rig:
    return rig_of(SPECS[0])


def content(rig: Rig, page: int) -> list[Tensor]:
    return [part.clone() for part in rig.content(page)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_fork_in_the_middle_of_a_page_matches_eager_attention(rig: Rig) -> None:
    """Row 2 diverges after 1 to page_size tokens of row 1's second page, and never sees that page's later tokens."""
    page_size = rig.geometry.page_size
    for count in (1, page_size // 2, page_size - 1, page_size):
        core, recording = rig.core(), Recording()
        tokens = rig.prompt(2 * page_size + 3, seed=count)
        first = core.add(1, tokens)
        rig.step(core, chunks={1: len(tokens)})
        known = page_size + count
        fork = core.add(2, [*tokens[:known], (tokens[known] + 1) % 131], shared=first.pages[:1], position=known)
        target = fork.pages[1]
        rig.spoil(target)
        moves = Moves(copies=[(first.pages[1], target, count)])
        rig.step(core, recording, decode=[2, 1], moves=moves)
        for _ in range(3):
            rig.step(core, recording, decode=[1, 2])
        rig.check(core, recording)


def test_several_forks_of_an_unfinished_prompt_match(rig: Rig) -> None:
    """num_samples: the prompt's last page is copied in the plan after the one that fills it; one plan, two copies."""
    page_size = rig.geometry.page_size
    length = page_size + page_size // 2
    core, recording = rig.core(), Recording()
    tokens = rig.prompt(length, seed=3)
    first = core.add(1, tokens)
    rig.runner.submit(core.plan(chunks={1: length}))
    copies = []
    for row, extra in ((2, 5), (3, 9)):
        fork = core.add(row, [*tokens, extra], shared=first.pages[:1], position=length)
        copies.append((first.pages[1], fork.pages[1], length - page_size))
        rig.spoil(fork.pages[1])
    core.sampled = [1]
    core.learn(rig.runner.collect().tokens)
    rig.step(core, recording, decode=[3, 1, 2], moves=Moves(copies=copies))
    rig.step(core, recording, decode=[1, 2, 3])
    rig.check(core, recording)


def test_a_swapped_out_sequence_resumes_on_other_pages(rig: Rig) -> None:
    """Its pages go to other rows in the plan that saves them; later it runs in another row, on other pages, with the
    same results."""
    page_size = rig.geometry.page_size
    length = 2 * page_size + 5
    core, recording = rig.core(), Recording()
    first = core.add(1, rig.prompt(length, seed=7))
    rig.step(core, recording, chunks={1: length})
    rig.step(core, recording, decode=[1])
    slots = [8, 0, 1]
    saved, contents = list(first.pages), [content(rig, page) for page in first.pages]
    core.free_pages = [*reversed(first.pages), *core.free_pages]
    other = core.add(2, rig.prompt(length + 9, seed=8))
    assert set(other.pages) == set(saved)
    # All pages are zeroed for their next owner, which writes there in this step.
    moves = Moves(saves=list(zip(saved, slots, strict=True)), zero=saved)
    rig.step(core, recording, chunks={2: length + 9}, moves=moves)
    rig.check(core, recording)
    resumed = core.add(3, first.tokens, position=len(first.tokens) - 1)
    rig.spoil(*resumed.pages)
    recording = Recording()
    loads = list(zip(resumed.pages, slots, strict=True))
    rig.step(core, recording, decode=[2, 3], moves=Moves(loads=loads))
    for page, expected in zip(resumed.pages[:2], contents, strict=False):
        assert same(content(rig, page), expected)
    for _ in range(2):
        rig.step(core, recording, decode=[3, 2])
    rig.check(core, recording)


def test_a_partly_swapped_in_sequence_computes_the_rest(rig: Rig) -> None:
    page_size = rig.geometry.page_size
    length = 3 * page_size + 2
    core = rig.core()
    first = core.add(1, rig.prompt(length, seed=17))
    rig.step(core, chunks={1: length})
    rig.step(core, decode=[1], moves=Moves(saves=[(first.pages[1], 5), (first.pages[0], 6)]))
    recording = Recording()
    again = core.add(2, first.tokens, position=2 * page_size)
    loads = [(again.pages[0], 6), (again.pages[1], 5)]
    rig.spoil(*again.pages)
    # All are zeroed, since their last owner was not finite; loads come after.
    moves = Moves(loads=loads, zero=again.pages)
    rig.step(core, recording, chunks={2: len(first.tokens) - 2 * page_size}, moves=moves)
    rig.check(core, recording)


def order_all(rig: Rig, core: TinyCore, moves: Moves) -> None:
    outcome = rig.submit(core.plan(moves=moves))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail


def test_copies_from_host_memory_start_before_the_saves_of_their_plan(
    plain_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So on a GPU they do not wait for the pages to save, which the step in flight may still write."""
    rig, core, calls = plain_rig, plain_rig.core(), []
    order_all(rig, core, Moves(saves=[(1, 0), (2, 1)]))
    host = rig.runner.on_device.host

    def noting(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object) -> object:
            result = call(*args)
            calls.append((name, result))
            return result

        return noted

    for name in ("save", "fetch", "load"):
        monkeypatch.setattr(host, name, noting(name, getattr(host, name)))
    order_all(rig, core, Moves(saves=[(3, 2)], zero=[3], loads=[(4, 0)]))
    # One passage is on its way before the save.
    assert calls == [("fetch", 1), ("save", None), ("load", None)]
    calls.clear()
    order_all(rig, core, Moves(saves=[(5, 0)], loads=[(4, 0)]))
    assert calls == [("fetch", 0), ("save", None), ("load", None)]
    for pool in rig.pools:
        pool.zero_()


def test_random_page_orders_match_a_sequential_model(plain_rig: Rig) -> None:
    """Random plans of page orders alone, against a model that carries out one operation at a time, in worker.proto's
    order: pages that are saved, zeroed, copied to and loaded in one plan, and slots that are saved and loaded."""
    rig, core, draw = plain_rig, plain_rig.core(), random.Random(5)
    noise = torch.Generator().manual_seed(5)
    for pool in rig.pools:
        pool[:] = torch.randn(pool.shape, generator=noise)
    num_pages, num_slots = rig.geometry.num_pages, rig.geometry.host_pages
    pages = {page: content(rig, page) for page in range(1, num_pages)}
    host: dict[int, list[Tensor]] = {}

    def some(values: Iterable[int], most: int) -> list[int]:
        values = list(values)
        return draw.sample(values, draw.randint(0, min(most, len(values))))

    for _ in range(60):
        slots = some(range(num_slots), 4)
        saves = [(draw.randrange(1, num_pages), slot) for slot in slots]
        sources = some(pages, 3)
        others = [page for page in pages if page not in sources]
        targets = some(others, 5) if sources else []
        copies = [(draw.choice(sources), target, draw.randint(1, 16)) for target in targets]
        known = [*host, *slots]
        loads = [(page, draw.choice(known)) for page in some(others, 3)] if known else []
        moves = Moves(saves=saves, zero=some(others, 3), copies=copies, loads=loads)
        order_all(rig, core, moves)
        for page, slot in saves:
            host[slot] = pages[page]
        for page in moves.zero:
            pages[page] = [torch.zeros_like(part) for part in pages[page]]
        for source, target, count in copies:
            pages[target] = [part.clone() for part in pages[source]]
            for part in pages[target]:
                part[:, count:] = 0
        for page, slot in loads:
            pages[page] = host[slot]
        assert [page for page in pages if not same(content(rig, page), pages[page])] == []
    assert len(host) == num_slots
    for pool in rig.pools:
        pool.zero_()


def test_page_orders_wait_for_the_step_in_flight(plain_rig: Rig) -> None:
    """Saved while its last step is not collected, the page reused and loaded again: the stream keeps the order."""
    rig, core = plain_rig, plain_rig.core()
    prompt = rig.prompt(20, seed=3)
    first = core.add(1, prompt)
    rig.runner.submit(core.plan(chunks={1: 20}))
    core.sampled = [1]
    saved = list(first.pages)
    core.free_pages = [*saved, *core.free_pages]
    core.add(2, rig.prompt(30, seed=4))
    rig.runner.submit(core.plan(chunks={2: 30}, moves=Moves(saves=[(saved[0], 1), (saved[1], 2)])))
    core.learn(rig.runner.collect().tokens, sampled=[1])
    core.learn(rig.runner.collect().tokens, sampled=[2])
    again = core.add(3, first.tokens, position=20)
    recording = Recording()
    rig.step(core, recording, decode=[2, 3], moves=Moves(loads=[(again.pages[0], 1), (again.pages[1], 2)]))
    rig.check(core, recording)


def test_loading_an_unsaved_page_is_refused(plain_rig: Rig) -> None:
    rig = plain_rig
    rig.forget()
    core = rig.core()
    order_all(rig, core, Moves(saves=[(1, 0)], loads=[(2, 0)]))
    # After a lane reset the saved pages are still valid.
    core = rig.core()
    order_all(rig, core, Moves(loads=[(2, 0)]))
    outcome = rig.submit(core.plan(moves=Moves(loads=[(2, 4)])))
    assert outcome.status == pb.STEP_STATUS_FAILED
    assert outcome.detail == "loads.slots contains 4, to which no plan saved a page"
    # For a new scheduler nothing is saved.
    core = rig.core()
    rig.runner.join(pb.Joined(generation=core.generation))
    outcome = rig.submit(core.plan(moves=Moves(loads=[(2, 0)])))
    assert "loads.slots contains 0, to which no plan saved a page" in outcome.detail


def test_the_time_of_a_step_includes_its_page_orders(plain_rig: Rig) -> None:
    core = plain_rig.core()
    pages = list(range(1, 10))
    outcome = plain_rig.submit(core.plan(moves=Moves(saves=list(zip(pages, range(9), strict=True)))))
    assert (outcome.status, outcome.tokens.size) == (pb.STEP_STATUS_OK, 0)
    assert outcome.compute_us > 0
    assert not list(chain(outcome.nonfinite, core.rows))
