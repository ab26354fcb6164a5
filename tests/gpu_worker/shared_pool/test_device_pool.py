"""What only a pool on a GPU has: memory that comes late, a card that is full, a driver that fails.

Without a GPU the driver is `fake_libcuda.py`; on one (`--device cuda`) the driver, the checksums and the captured steps
are the real ones, within one process. `test_take_over.py` has what every pool has.
"""

from dataclasses import replace

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.shared_pool import device_pool
from gpu_worker.shared_pool.device_pool import DevicePool
from gpu_worker.shared_pool.messages import PoolDiffers
from gpu_worker.shared_pool.region import identity_hash
from tests.gpu_worker.cuda_memory.fake_libcuda import GRANULARITY, FakeCard
from tests.gpu_worker.plans import Moves, TinyCore
from tests.gpu_worker.rig import Rig
from tests.gpu_worker.shared_pool.machines import PAGE, PROMPT, Card, assert_undisturbed, order_of, served, taking
from tests.gpu_worker.shared_pool.test_take_over import assert_serves
from tests.rigs.descriptors import memory_closed_since, open_descriptors, opened_since


def pool_of(rig: Rig) -> DevicePool:
    assert isinstance(rig.runner.pool, DevicePool)
    return rig.runner.pool


def test_a_worker_that_waits_has_memory_for_its_first_pages_alone(card: Card) -> None:
    """It runs a scheduler's first plan with them. The next plan maps the whole pool, with what is in these pages."""
    rig = card.rig()
    whole = sum(pool.nbytes for pool in rig.runner.on_device.cache.pools)
    mapped = sum(pool_of(rig)._region.mapped.values())
    assert mapped <= 2 * 2 * 2 * 2 * GRANULARITY < whole
    core = TinyCore(rig.geometry, generation=1)
    core.add(1, rig.prompt(PROMPT, seed=3))
    rig.step(core, chunks={1: PROMPT})
    assert not pool_of(rig).is_whole and not card.holder.on_device
    rig.step(core, decode=[1])
    assert pool_of(rig).is_whole and rig.runner.pool.pool_id in card.holder.on_device
    for _ in range(20):
        rig.step(core, decode=[1])
    assert_undisturbed(rig, core)


def test_a_first_plan_with_a_late_page_maps_the_whole_pool(card: Card) -> None:
    rig = card.rig()
    core = TinyCore(rig.geometry, generation=1, page_order=[1299, 1298, 1, 2, 3])
    core.add(1, rig.prompt(PROMPT, seed=3))
    rig.step(core, chunks={1: PROMPT})
    assert pool_of(rig).is_whole
    # What was never written is zero, not what the memory had before.
    assert all(bool(pool.isfinite().all()) for pool in rig.runner.on_device.cache.pools)


def test_a_page_that_is_filled_while_a_later_step_reuses_it_is_not_whole(card: Card) -> None:
    """Two steps are in flight: the second one zeroes a page that the first one fills."""
    rig = card.rig(is_whole=True)
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


def test_a_pool_of_another_geometry_or_model_is_refused(card: Card) -> None:
    first, second = card.rig(is_whole=True), card.rig(identity="another model")
    core = served(first)
    _, outcome = card.succeed(first, second, core, 3)
    assert outcome.detail.startswith("the model of the pool is ")
    other = card.rig(spec=replace(card.spec, num_pages=1200))
    _, outcome = taking(other, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC and "are needed" in outcome.detail
    assert len({pool_of(rig).layout for rig in (first, second, other)}) == 2


def test_a_worker_that_died_before_it_served_leaves_nothing(card: Card) -> None:
    _, second, core = card.pair()
    waiting = card.rig()
    card.dies(waiting)
    _, outcome = taking(second, core, 3, order_of(waiting))
    assert outcome.detail == "the pool has no memory on a device: its worker died before it served"


fake_only = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="needs the fake driver")


@fake_only
def test_another_card_has_another_layout(card: Card) -> None:
    first = card.rig()
    card.fake = FakeCard(uuid=b"another of its k")
    assert pool_of(first).layout != pool_of(card.rig()).layout


@fake_only
def test_unused_pools_make_room_and_a_full_card_is_named(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pool, "_GROW_SECONDS", 0.0)
    first, second, core = card.pair()
    held = sum(pool_of(first)._region.mapped.values())
    # Room for the pool that is held and the pieces of the second worker, but not for a second pool.
    card.fake.num_bytes = card.fake.used() + GRANULARITY
    second.step(one := TinyCore(core.geometry, generation=1, page_order=list(range(1, 9))), chunks=begun(second, one))
    refused = second.submit(one.plan(decode=[1]))
    assert refused.status == pb.STEP_STATUS_OUT_OF_SYNC
    assert refused.detail == (
        f"the KV pool of {held >> 20} MiB cannot be allocated: cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2): "
        "out of memory; nvidia-smi shows what else uses the GPU, and a pool of a dead worker is kept for 600 s"
    )
    # The first worker dies, and no other one has taken its pool over.
    monkeypatch.undo()
    card.libraries[0].end()
    card.dies(first)
    again = TinyCore(core.geometry, generation=2)
    second.step(again, chunks=begun(second, again))
    second.step(again, decode=[1])
    assert pool_of(second).is_whole and first.runner.pool.pool_id not in card.holder.memories


def begun(rig: Rig, core: TinyCore) -> dict[int, int]:
    core.add(1, rig.prompt(5, seed=1))
    return {1: 5}


@fake_only
@pytest.mark.parametrize(
    "name", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_memory_that_cannot_be_mapped_leaves_the_own_pool(card: Card, name: str) -> None:
    first, second = card.rig(is_whole=True), card.rig()
    core, own = served(first), second.runner.pool.pool_id
    card.dies(first)
    mapped, before = dict(pool_of(second)._region.mapped), open_descriptors()
    card.libraries[1].fails[name] = 1
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC
    assert outcome.detail.startswith(f"the pool of a dead worker cannot be mapped: {name} failed with"), outcome.detail
    assert (outcome.pool_id, pool_of(second)._region.mapped) == (own, mapped)
    assert not opened_since(before) and not memory_closed_since(before)
    # It serves with a pool of its own.
    card.libraries[1].fails.clear()
    assert_serves(second, core)
    assert pool_of(second).is_whole


@fake_only
def test_no_handle_and_no_descriptor_is_left(card: Card) -> None:
    """A handle would keep the memory after the pool was given back."""
    first, second, core = card.pair()
    assert not card.libraries[0].handles and not card.libraries[1].handles
    card.libraries[0].end()
    card.dies(first)
    before = open_descriptors()
    _, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OK and not card.libraries[1].handles
    # The second worker's own header is gone.
    assert memory_closed_since(before) == ["/memfd:test (deleted)"]
    assert not opened_since(before)
    assert card.fake.used() == sum(pool_of(second)._region.mapped.values())
    pool_of(second)._region.clear()
    card.holder.close()
    assert card.fake.used() == 0


def test_a_new_session_zeroes_what_has_memory(card: Card) -> None:
    rig = card.rig()
    served(rig)
    rig.runner.join(pb.Joined(generation=9))
    assert pool_of(rig).is_whole and not any(bool(pool.any()) for pool in rig.runner.on_device.cache.pools)
    header, pool = pool_of(rig)._header, pool_of(rig)
    assert not any(header.filled_by)
    with pytest.raises(PoolDiffers, match="generation 9 has written to the pool; 8 is the last one expected"):
        header.check(pool_id=pool.pool_id, layout=pool.layout, identity=identity_hash("model"), generation=8)
