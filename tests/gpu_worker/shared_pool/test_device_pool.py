"""A runner takes over a pool on a GPU from a dead one: same tokens, and nothing damaged is believed.

Without a GPU the driver is `fake_libcuda.py`, and the runners compute on the CPU, on the same addresses. On one
(`--device cuda`) the driver, the checksums and the captured steps are the real ones, within one process. The truth is
an undisturbed run.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.attention.layers import LayerMap
from gpu_worker.cuda.graphs import CudaGraphs
from gpu_worker.geometry import Geometry
from gpu_worker.shared_pool import device_pool
from gpu_worker.shared_pool.cuda_driver import Driver, cuda_driver
from gpu_worker.shared_pool.device_pool import DevicePool
from gpu_worker.shared_pool.messages import PoolDiffers
from gpu_worker.shared_pool.region import identity_hash
from gpu_worker.wire.frames import Outcome
from tests.gpu_worker.cuda_memory.fake_libcuda import GRANULARITY, FakeCard, FakeLibcuda
from tests.gpu_worker.plans import Moves, TinyCore
from tests.gpu_worker.rig import Recording, Rig, RigSpec
from tests.gpu_worker.shared_pool.fake_holder import FakeHolder
from tests.gpu_worker.shared_pool.test_take_over import NUMBERS

# Heads of 5 MiB: the first pages are in some of their granules.
SPEC = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, num_pages=1300)
CAPTURED = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, num_pages=1300, graphs=True)
PAGE, PROMPT = SPEC.page_size, 3 * SPEC.page_size + 5


@dataclass(kw_only=True)
class Card:
    """What runners of one machine share: the card, its driver for each of them, and the holder."""

    device: torch.device
    spec: RigSpec
    fake: FakeCard = field(default_factory=FakeCard)
    holder: FakeHolder = field(default_factory=FakeHolder)
    libraries: list[FakeLibcuda] = field(default_factory=list[FakeLibcuda])

    def driver(self) -> Driver:
        if self.device.type == "cuda":
            return cuda_driver(self.device.index or 0)
        self.libraries.append(FakeLibcuda(self.fake))
        return Driver(self.libraries[-1], 0)

    def rig(self, *, is_whole: bool = False, identity: str = "model", spec: RigSpec | None = None) -> Rig:
        driver = self.driver()

        def pool_of(layers: LayerMap, geometry: Geometry, dtype: torch.dtype) -> DevicePool:
            return DevicePool(
                self.holder,  # type: ignore[arg-type]
                driver,
                layers,
                geometry,
                dtype,
                identity=identity,
                device=self.device,
                is_whole=is_whole,
            )

        graphs = CudaGraphs(self.device) if self.device.type == "cuda" and self.spec.graphs else None
        rig = Rig(spec or self.spec, self.device, pool_of, graphs=graphs)
        rig.runner.join(pb.Joined(generation=rig.core().generation))
        return rig

    def dies(self, rig: Rig) -> None:
        """The runner is not used again. On the fake card its driver gives up all that its process had."""
        self.holder.dead.add(rig.runner.pool_id)


@pytest.fixture(params=[SPEC, CAPTURED], ids=["eager", "captured"])
def card(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Card]:
    card = Card(device=device, spec=request.param)
    yield card
    card.holder.close()
    for library in card.libraries:
        library.end()


@pytest.fixture
def eager(device: torch.device) -> Iterator[Card]:
    card = Card(device=device, spec=SPEC)
    yield card
    card.holder.close()
    for library in card.libraries:
        library.end()


def pool_of(rig: Rig) -> DevicePool:
    assert isinstance(rig.runner.pool, DevicePool)
    return rig.runner.pool


def served(rig: Rig, num_tokens: int = PROMPT, *, generation: int = 1, step: int = 1) -> TinyCore:
    """The runner computes a prompt of `num_tokens`, in this step, and two tokens more."""
    core = TinyCore(rig.geometry, generation=generation)
    if step > 1:
        rig.runner.reset(generation)
        core.step = rig.runner._step = step - 1
    core.add(1, rig.prompt(num_tokens, seed=3))
    rig.step(core, chunks={1: num_tokens})
    for _ in range(2):
        rig.step(core, decode=[1])
    return core


def taking(rig: Rig, core: TinyCore, num_shared: int, order: pb.TakeOver) -> tuple[TinyCore, Outcome]:
    """The rig takes the pool over; its row 1 begins with `num_shared` pages of the dead runner."""
    old = core.rows[1]
    after = TinyCore(core.geometry, generation=core.generation + 1, page_order=list(core.free_pages))
    after.add(1, old.tokens, shared=old.pages[:num_shared], position=num_shared * PAGE)
    message = after.plan(chunks={1: len(old.tokens) - num_shared * PAGE})
    message.take_over.CopyFrom(order)
    outcome = rig.submit(message)
    if outcome.status == pb.STEP_STATUS_OK:
        after.learn(outcome.tokens)
    return after, outcome


def order_of(rig: Rig, generation: int = 1) -> pb.TakeOver:
    return pb.TakeOver(pool_id=rig.runner.pool_id, generation=generation)


def undisturbed(rig: Rig, core: TinyCore, num_tokens: int) -> list[int]:
    """The tokens of a run in which nothing died."""
    truth = TinyCore(core.geometry, generation=9)
    truth.add(1, core.rows[1].tokens[:PROMPT])
    rig.step(truth, chunks={1: PROMPT})
    while len(truth.rows[1].tokens) < num_tokens:
        rig.step(truth, decode=[1])
    return truth.rows[1].tokens


def test_pages_are_read_where_the_dead_runner_wrote_them(card: Card) -> None:
    first, second = card.rig(is_whole=True), card.rig()
    core, own = served(first), second.runner.pool_id
    assert pool_of(first).is_whole and not pool_of(second).is_whole
    card.dies(first)
    after, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    assert outcome.pool_id == first.runner.pool_id == second.runner.pool_id
    assert own not in card.holder.memories and pool_of(second).is_whole
    for _ in range(2 * PAGE):
        second.step(after, decode=[1])
    assert undisturbed(second, core, len(after.rows[1].tokens)) == after.rows[1].tokens


def test_a_third_runner_takes_over_what_the_second_one_wrote(eager: Card) -> None:
    first, second = eager.rig(is_whole=True), eager.rig()
    core = served(first)
    eager.dies(first)
    after, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    for _ in range(PAGE):
        second.step(after, decode=[1])
    eager.dies(second)
    third = eager.rig()
    last, outcome = taking(third, after, 4, order_of(second, generation=2))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    assert undisturbed(third, core, len(last.rows[1].tokens)) == last.rows[1].tokens


def test_hidden_states_are_float64_s(eager: Card) -> None:
    first, second, recording = eager.rig(is_whole=True), eager.rig(), Recording()
    core = served(first)
    eager.dies(first)
    after, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    for _ in range(4):
        second.step(after, recording, decode=[1])
    second.check(after, recording)


def test_a_worker_that_waits_has_memory_for_its_first_pages_alone(eager: Card) -> None:
    """It runs a scheduler's first plan with them. The next plan maps the whole pool, with what is in these pages."""
    rig = eager.rig()
    whole = sum(pool.nbytes for pool in rig.runner.on_device.cache.pools)
    mapped = sum(num_bytes for _, num_bytes in pool_of(rig)._region.mapped)
    assert mapped <= 2 * 2 * 2 * 2 * GRANULARITY < whole
    core = TinyCore(rig.geometry, generation=1)
    core.add(1, rig.prompt(PROMPT, seed=3))
    rig.step(core, chunks={1: PROMPT})
    assert not pool_of(rig).is_whole and not eager.holder.on_device
    rig.step(core, decode=[1])
    assert pool_of(rig).is_whole and rig.runner.pool_id in eager.holder.on_device
    for _ in range(20):
        rig.step(core, decode=[1])
    assert undisturbed(rig, core, len(core.rows[1].tokens)) == core.rows[1].tokens


def test_a_first_plan_with_a_late_page_maps_the_whole_pool(eager: Card) -> None:
    rig = eager.rig()
    core = TinyCore(rig.geometry, generation=1, page_order=[1299, 1298, 1, 2, 3])
    core.add(1, rig.prompt(PROMPT, seed=3))
    rig.step(core, chunks={1: PROMPT})
    assert pool_of(rig).is_whole
    # What was never written is zero, not what the memory had before.
    assert all(bool(pool.isfinite().all()) for pool in rig.runner.on_device.cache.pools)


def damage(rig: Rig, page: int) -> None:
    """Changes one bit of a page in the first layer's V."""
    word = rig.runner.on_device.cache.values[0].view(torch.int32)[1, page * PAGE + 3, 5]
    word.bitwise_xor_(1)


def test_a_changed_bit_is_found_and_the_pool_zeroed(card: Card) -> None:
    first, second = card.rig(is_whole=True), card.rig()
    core = served(first)
    damage(first, core.rows[1].pages[1])
    card.dies(first)
    _, outcome = taking(second, core, 3, order_of(first))
    assert (outcome.status, outcome.detail) == (
        pb.STEP_STATUS_OUT_OF_SYNC,
        "page 2 of the pool that was taken over has changed since step 1 filled it",
    )
    assert outcome.pool_id == first.runner.pool_id
    assert not any(bool(pool.any()) for pool in second.runner.on_device.cache.pools)
    again = TinyCore(core.geometry, generation=3)
    again.add(1, core.rows[1].tokens[:PROMPT])
    second.step(again, chunks={1: PROMPT})
    second.step(again, decode=[1])
    assert again.rows[1].tokens[PROMPT] == core.rows[1].tokens[PROMPT]


@pytest.mark.parametrize(("generation", "step"), NUMBERS)
def test_plans_of_any_number_leave_whole_pages(eager: Card, generation: int, step: int) -> None:
    first, second = eager.rig(is_whole=True), eager.rig()
    core = served(first, generation=generation, step=step)
    damage(first, core.rows[1].pages[1])
    eager.dies(first)
    after, outcome = taking(second, core, 1, order_of(first, generation))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    after.add(2, after.rows[1].tokens[: 2 * PAGE + 1], shared=core.rows[1].pages[:2], position=2 * PAGE)
    outcome = second.submit(after.plan(chunks={2: 1}))
    assert outcome.detail == f"page 2 of the pool that was taken over has changed since step {step} filled it"


def test_a_page_that_is_not_full_or_begun_again_is_refused(eager: Card) -> None:
    first, second, third = eager.rig(is_whole=True), eager.rig(), eager.rig()
    core = served(first)
    first.step(core, decode=[1], moves=Moves(zero=[core.rows[1].pages[0]]))
    eager.dies(first)
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.detail == "page 1 of the pool that was taken over is not whole"
    core.rows[1].tokens += [1] * PAGE
    eager.dies(second)
    core.rows[1].pages[0] = core.rows[1].pages[3]
    _, outcome = taking(third, core, 1, order_of(second, generation=2))
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC


def test_a_page_that_is_filled_while_a_later_step_reuses_it_is_not_whole(eager: Card) -> None:
    """Two steps are in flight: the second one zeroes a page that the first one fills."""
    rig = eager.rig(is_whole=True)
    core = TinyCore(rig.geometry, generation=1)
    core.add(1, rig.prompt(2 * PAGE, seed=3))
    rig.runner.submit(core.plan(chunks={1: 2 * PAGE}))
    core.rows[1].tokens.append(1)
    rig.runner.submit(core.plan(decode=[1], moves=Moves(zero=[core.rows[1].pages[1]])))
    while rig.runner.collect() is not None:
        pass
    filled_by = pool_of(rig)._header.filled_by
    assert filled_by[core.rows[1].pages[0]] == 1
    assert filled_by[core.rows[1].pages[1]] == 0


def test_a_pool_of_a_living_worker_another_geometry_or_model_is_refused(eager: Card) -> None:
    first, second = eager.rig(is_whole=True), eager.rig(identity="another model")
    core, own = served(first), second.runner.pool_id
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.detail == "process 7 still uses the pool"
    assert outcome.pool_id == own and own in eager.holder.memories
    eager.dies(first)
    second.runner.reset(1)
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.detail.startswith("the model of the pool is ")
    smaller = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, num_pages=1200)
    other = eager.rig(spec=smaller)
    _, outcome = taking(other, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC and "are needed" in outcome.detail
    assert len({pool_of(rig).layout for rig in (first, second, other)}) == 2


def test_a_worker_that_died_before_it_served_leaves_nothing(eager: Card) -> None:
    first, second = eager.rig(is_whole=True), eager.rig()
    core = served(first)
    waiting = eager.rig()
    eager.dies(waiting)
    _, outcome = taking(second, core, 3, order_of(waiting))
    assert outcome.detail == "the pool has no memory on a device: its worker died before it served"


fake_only = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="needs the fake driver")


@fake_only
def test_another_card_has_another_layout(eager: Card) -> None:
    first = eager.rig()
    eager.fake = FakeCard(uuid=b"another of its k")
    assert pool_of(first).layout != pool_of(eager.rig()).layout


@fake_only
def test_unused_pools_make_room_and_a_full_card_is_named(eager: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pool, "_GROW_SECONDS", 0.0)
    first, second = eager.rig(is_whole=True), eager.rig()
    core = served(first)
    held = sum(num_bytes for _, num_bytes in pool_of(first)._region.mapped)
    # Room for the pool that is held and the pieces of the second worker, but not for a second pool.
    eager.fake.num_bytes = eager.fake.used() + GRANULARITY
    second.step(one := TinyCore(core.geometry, generation=1, page_order=list(range(1, 9))), chunks=begun(second, one))
    refused = second.submit(one.plan(decode=[1]))
    assert refused.status == pb.STEP_STATUS_OUT_OF_SYNC
    assert refused.detail == (
        f"the KV pool of {held >> 20} MiB cannot be allocated: cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2): "
        "out of memory; nvidia-smi shows what else uses the GPU, and a pool of a dead worker is kept for 600 s"
    )
    # The first worker dies, and no other one has taken its pool over.
    monkeypatch.undo()
    eager.libraries[0].end()
    eager.dies(first)
    again = TinyCore(core.geometry, generation=2)
    second.step(again, chunks=begun(second, again))
    second.step(again, decode=[1])
    assert pool_of(second).is_whole and first.runner.pool_id not in eager.holder.memories


def begun(rig: Rig, core: TinyCore) -> dict[int, int]:
    core.add(1, rig.prompt(5, seed=1))
    return {1: 5}


@fake_only
@pytest.mark.parametrize(
    "name", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_memory_that_cannot_be_mapped_leaves_the_own_pool(eager: Card, name: str) -> None:
    first, second = eager.rig(is_whole=True), eager.rig()
    core, own = served(first), second.runner.pool_id
    eager.dies(first)
    mapped, before = pool_of(second)._region.mapped, set(os.listdir("/proc/self/fd"))
    eager.libraries[1].fails[name] = 1
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC
    assert outcome.detail.startswith(f"the pool of a dead worker cannot be mapped: {name} failed with"), outcome.detail
    assert (outcome.pool_id, pool_of(second)._region.mapped) == (own, mapped)
    assert set(os.listdir("/proc/self/fd")) == before
    # It serves with a pool of its own.
    eager.libraries[1].fails.clear()
    again = TinyCore(core.geometry, generation=3)
    again.add(1, core.rows[1].tokens[:PROMPT])
    second.step(again, chunks={1: PROMPT})
    second.step(again, decode=[1])
    assert again.rows[1].tokens[PROMPT] == core.rows[1].tokens[PROMPT] and pool_of(second).is_whole


@fake_only
def test_no_handle_and_no_descriptor_is_left(eager: Card) -> None:
    """A handle would keep the memory after the pool was given back."""
    first, second = eager.rig(is_whole=True), eager.rig()
    core = served(first)
    assert not eager.libraries[0].handles and not eager.libraries[1].handles
    eager.libraries[0].end()
    eager.dies(first)
    descriptors = len(os.listdir("/proc/self/fd"))
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OK and not eager.libraries[1].handles
    # The second worker's own header is gone.
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    assert eager.fake.used() == sum(num_bytes for _, num_bytes in pool_of(second)._region.mapped)
    pool_of(second)._region.clear()
    eager.holder.close()
    assert eager.fake.used() == 0


def test_a_new_session_zeroes_what_has_memory(eager: Card) -> None:
    rig = eager.rig()
    served(rig)
    rig.runner.join(pb.Joined(generation=9))
    assert pool_of(rig).is_whole and not any(bool(pool.any()) for pool in rig.runner.on_device.cache.pools)
    header, pool = pool_of(rig)._header, pool_of(rig)
    assert not any(header.filled_by)
    with pytest.raises(PoolDiffers, match="generation 9 has written to the pool; 8 is the last one expected"):
        header.check(pool_id=pool.pool_id, layout=pool.layout, identity=identity_hash("model"), generation=8)
