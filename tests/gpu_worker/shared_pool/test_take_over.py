"""A second runner takes the pool of a first one over: same tokens and hidden states, and nothing damaged is believed.

Both are in this process; a list of pools of dead users stands for the holder. The truth is float64.
"""

import errno
import mmap
import os
from dataclasses import dataclass

import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.shared_pool.pool import SharedPool
from gpu_worker.shared_pool.region import Region, header_bytes
from gpu_worker.wire.frames import Outcome
from tests.gpu_worker.plans import Moves, TinyCore
from tests.gpu_worker.rig import Recording, Rig, RigSpec
from tests.gpu_worker.shared_pool.fake_holder import FakeHolder

SPEC = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32)
CAPTURED = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, graphs=True)
PAGE = SPEC.page_size
# Generation and first step of a second and a third scheduler with a journal, and the largest that frames can hold.
NUMBERS = [(2**32 + 1, 1), (2**33 + 1, 2**32), (2**64 - 2, 2**64 - 3)]


@dataclass(slots=True, kw_only=True)
class Pair:
    """Two runners of the same model. The first one `dies` by not being used again."""

    holder: FakeHolder
    first: Rig
    second: Rig

    def order(self, generation: int = 1) -> pb.TakeOver:
        pool_id = self.first.runner.pool_id
        self.holder.dead.add(pool_id)
        return pb.TakeOver(pool_id=pool_id, generation=generation)

    def take_over(self, core: TinyCore, order: pb.TakeOver, **plan: object) -> Outcome:
        """The second runner's next plan, which takes the pool over."""
        message = core.plan(**plan)  # type: ignore[arg-type]
        message.take_over.CopyFrom(order)
        return self.second.submit(message)


def rig_of(spec: RigSpec, holder: FakeHolder, identity: str = "model") -> Rig:
    def pool_of(layers: object, geometry: Geometry, dtype: torch.dtype) -> SharedPool:
        return SharedPool(holder, layers, geometry, dtype, identity=identity)  # type: ignore[arg-type]

    rig = Rig(spec, torch.device("cpu"), pool_of)
    rig.runner.join(pb.Joined(generation=rig.core().generation))
    return rig


@pytest.fixture(params=[SPEC, CAPTURED], ids=["eager", "captured"])
def pair(request: pytest.FixtureRequest) -> Pair:
    holder = FakeHolder()
    return Pair(holder=holder, first=rig_of(request.param, holder), second=rig_of(request.param, holder))


def run_first(pair: Pair, num_tokens: int, *, generation: int = 1, step: int = 1) -> TinyCore:
    """The first runner computes a prompt of `num_tokens`, in this step, and two tokens more."""
    core, runner = TinyCore(pair.first.geometry, generation=generation), pair.first.runner
    if step > 1:
        runner.reset(generation)
        core.step = runner._step = step - 1
    core.add(1, pair.first.prompt(num_tokens, seed=3))
    pair.first.step(core, chunks={1: num_tokens})
    for _ in range(2):
        pair.first.step(core, decode=[1])
    return core


def continued(pair: Pair, core: TinyCore, num_shared: int) -> TinyCore:
    """A core of the next generation; its row 1 starts with `num_shared` pages of the dead runner."""
    old = core.rows[1]
    after = TinyCore(core.geometry, generation=core.generation + 1, page_order=list(core.free_pages))
    after.add(1, old.tokens, shared=old.pages[:num_shared], position=num_shared * PAGE)
    return after


def test_pages_are_read_where_the_first_runner_wrote_them(pair: Pair) -> None:
    core = run_first(pair, 3 * PAGE + 5)
    after, own = continued(pair, core, 3), pair.second.runner.pool_id
    # Step 1 is ordinary: the pool is taken over when the worker is seated.
    after.step = 0
    count = len(after.rows[1].tokens) - 3 * PAGE
    outcome = pair.take_over(after, pair.order(), chunks={1: count})
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    assert outcome.pool_id == pair.first.runner.pool_id == pair.second.runner.pool_id
    assert own not in pair.holder.memories
    after.learn(outcome.tokens)
    for _ in range(3):
        pair.second.step(after, decode=[1])
    # The undisturbed run.
    truth = TinyCore(core.geometry, generation=5)
    truth.add(1, after.rows[1].tokens[: 3 * PAGE + 5])
    pair.second.step(truth, chunks={1: 3 * PAGE + 5})
    while len(truth.rows[1].tokens) < len(after.rows[1].tokens):
        pair.second.step(truth, decode=[1])
    assert truth.rows[1].tokens == after.rows[1].tokens


def test_hidden_states_are_float64_s() -> None:
    holder = FakeHolder()
    pair = Pair(holder=holder, first=rig_of(SPEC, holder), second=rig_of(SPEC, holder))
    after, recording = continued(pair, run_first(pair, 4 * PAGE - 1), 4), Recording()
    outcome = pair.take_over(after, pair.order(), chunks={1: len(after.rows[1].tokens) - 4 * PAGE})
    after.learn(outcome.tokens)
    for _ in range(4):
        pair.second.step(after, recording, decode=[1])
    pair.second.check(after, recording)


def damage(pair: Pair, offset: int) -> None:
    with mmap.mmap(pair.holder.memories[pair.first.runner.pool_id], 0) as content:
        content[offset] ^= 1


def offset_of_page(pair: Pair, page: int) -> int:
    """The first byte of a page in the first layer's K."""
    return header_bytes(pair.first.geometry.num_pages) + page * PAGE * SPEC.head_dim * 4


def test_a_changed_bit_is_found_and_the_pool_zeroed(pair: Pair) -> None:
    core = run_first(pair, 3 * PAGE + 5)
    damage(pair, offset_of_page(pair, core.rows[1].pages[1]) + 77)
    after = continued(pair, core, 3)
    outcome = pair.take_over(after, pair.order(), chunks={1: len(after.rows[1].tokens) - 3 * PAGE})
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC
    assert outcome.detail == "page 2 of the pool that was taken over has changed since step 1 filled it"
    assert outcome.pool_id == pair.second.runner.pool_id
    assert not any(pool.any() for pool in pair.second.runner.on_device.cache.pools)
    # The next generation computes everything in the zeroed pool.
    again = TinyCore(core.geometry, generation=3)
    again.add(1, core.rows[1].tokens[: 3 * PAGE + 5])
    pair.second.step(again, chunks={1: 3 * PAGE + 5})
    pair.second.step(again, decode=[1])
    assert again.rows[1].tokens[3 * PAGE + 5] == core.rows[1].tokens[3 * PAGE + 5]


def test_pages_that_nobody_reads_are_not_checked(pair: Pair) -> None:
    core = run_first(pair, 3 * PAGE + 5)
    damage(pair, offset_of_page(pair, core.rows[1].pages[2]) + 5)
    after = continued(pair, core, 2)
    outcome = pair.take_over(after, pair.order(), chunks={1: len(after.rows[1].tokens) - 2 * PAGE})
    assert outcome.status == pb.STEP_STATUS_OK
    # A page is checked once.
    damage(pair, offset_of_page(pair, core.rows[1].pages[0]) + 5)
    after.add(2, after.rows[1].tokens[: 2 * PAGE + 1], shared=core.rows[1].pages[:2], position=2 * PAGE)
    after.rows[1].tokens[after.rows[1].position] = 1
    assert pair.second.submit(after.plan(decode=[2])).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(("generation", "step"), NUMBERS)
def test_plans_of_any_number_leave_whole_pages(generation: int, step: int) -> None:
    holder = FakeHolder()
    pair = Pair(holder=holder, first=rig_of(SPEC, holder), second=rig_of(SPEC, holder))
    core = run_first(pair, 3 * PAGE + 5, generation=generation, step=step)
    after = continued(pair, core, 1)
    damage(pair, offset_of_page(pair, core.rows[1].pages[1]))
    outcome = pair.take_over(after, pair.order(generation), chunks={1: len(after.rows[1].tokens) - PAGE})
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    after.add(2, after.rows[1].tokens[: 2 * PAGE + 1], shared=core.rows[1].pages[:2], position=2 * PAGE)
    outcome = pair.second.submit(after.plan(chunks={2: 1}))
    assert outcome.detail == f"page 2 of the pool that was taken over has changed since step {step} filled it"


@pytest.mark.parametrize("num_prompt", [3 * PAGE, 3 * PAGE - 1, 3 * PAGE - 2])
def test_a_page_that_a_chunk_or_a_decode_fills_to_its_end_is_whole(num_prompt: int) -> None:
    holder = FakeHolder()
    pair = Pair(holder=holder, first=rig_of(SPEC, holder), second=rig_of(SPEC, holder))
    after = continued(pair, run_first(pair, num_prompt), 3)
    outcome = pair.take_over(after, pair.order(), chunks={1: len(after.rows[1].tokens) - 3 * PAGE})
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail


def test_a_page_that_is_not_full_is_refused(pair: Pair) -> None:
    core = run_first(pair, 2 * PAGE + 5)
    after = TinyCore(core.geometry, generation=2)
    after.add(1, [*core.rows[1].tokens, *range(PAGE)], shared=core.rows[1].pages[:3], position=3 * PAGE)
    outcome = pair.take_over(after, pair.order(), chunks={1: len(after.rows[1].tokens) - 3 * PAGE})
    assert (outcome.status, outcome.detail) == (
        pb.STEP_STATUS_OUT_OF_SYNC,
        "page 3 of the pool that was taken over is not whole",
    )


def test_a_page_that_a_later_step_began_to_write_is_refused(pair: Pair) -> None:
    """The first runner zeroes a page in a step that it never confirmed."""
    core = run_first(pair, 3 * PAGE + 5)
    pair.first.step(core, decode=[1], moves=Moves(zero=[core.rows[1].pages[0]]))
    after = continued(pair, core, 3)
    outcome = pair.take_over(after, pair.order(), chunks={1: len(after.rows[1].tokens) - 3 * PAGE})
    assert outcome.detail == "page 1 of the pool that was taken over is not whole"


def test_a_pool_in_use_is_refused_and_the_own_pool_stays(pair: Pair) -> None:
    after = continued(pair, run_first(pair, 3 * PAGE), 2)
    order, own = pair.order(), pair.second.runner.pool_id
    pair.holder.dead.clear()
    outcome = pair.take_over(after, order, chunks={1: len(after.rows[1].tokens) - 2 * PAGE})
    assert (outcome.status, outcome.detail) == (pb.STEP_STATUS_OUT_OF_SYNC, "process 7 still uses the pool")
    assert outcome.pool_id == own and own in pair.holder.memories


@pytest.mark.parametrize(
    ("generation", "offset", "words"),
    [
        (0, None, "generation 1 has written to the pool; 0 is the last one expected"),
        (1, 0, "the memory is not a KV pool of version 1"),
        (1, 8, "the memory is not a KV pool of version 1"),
        (1, 24, "the id of the pool is 01"),
        (1, 40, "the layout of the pool is "),
        (1, 72, "the model of the pool is "),
    ],
)
def test_a_header_that_differs_is_refused(generation: int, offset: int | None, words: str) -> None:
    holder = FakeHolder()
    pair = Pair(holder=holder, first=rig_of(SPEC, holder), second=rig_of(SPEC, holder))
    after = continued(pair, run_first(pair, 3 * PAGE), 2)
    if offset is not None:
        damage(pair, offset)
    own = pair.second.runner.pool_id
    order = pair.order(generation)
    outcome = pair.take_over(after, order, chunks={1: len(after.rows[1].tokens) - 2 * PAGE})
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC and outcome.detail.startswith(words), outcome.detail
    assert pair.second.runner.pool_id == own


def test_another_shape_or_window_has_another_layout() -> None:
    holder = FakeHolder()
    small = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, num_pages=14)
    window = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, bound=(30, 2))
    assert len({rig_of(spec, holder).runner.pool.layout for spec in (SPEC, small, window)}) == 3


def test_a_worker_without_a_shared_pool_says_so() -> None:
    rig = Rig(SPEC, torch.device("cpu"))
    core = rig.core()
    core.add(1, rig.prompt(5, seed=1))
    message = core.plan(chunks={1: 5})
    message.take_over.pool_id = bytes(16)
    outcome = rig.submit(message)
    assert (outcome.status, outcome.detail) == (
        pb.STEP_STATUS_OUT_OF_SYNC,
        "the pool of this worker is not in shared memory",
    )


def test_a_pool_that_cannot_be_mapped_is_out_of_sync_and_the_own_one_is_zeroed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = run_first(pair, 3 * PAGE + 5)
    after, order = continued(pair, core, 3), pair.order()
    # Its own pool is not zero either.
    own = TinyCore(core.geometry, generation=1)
    own.add(1, pair.second.prompt(5, seed=1))
    pair.second.step(own, chunks={1: 5})

    def fail(region: Region, memory: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(Region, "replace", fail)
    outcome = pair.take_over(after, order, chunks={1: len(after.rows[1].tokens) - 3 * PAGE})
    assert (outcome.status, outcome.detail) == (
        pb.STEP_STATUS_OUT_OF_SYNC,
        "the pool of a dead worker cannot be mapped: [Errno 12] Cannot allocate memory",
    )
    assert not any(pool.any() for pool in pair.second.runner.on_device.cache.pools)


def test_a_new_session_zeroes_the_pool_and_frees_its_memory(pair: Pair) -> None:
    run_first(pair, 3 * PAGE)
    memory = pair.holder.memories[pair.first.runner.pool_id]
    before = os.fstat(memory).st_blocks
    pair.first.runner.join(pb.Joined(generation=9))
    assert os.fstat(memory).st_blocks < before
    assert not any(pool.any() for pool in pair.first.runner.on_device.cache.pools)
