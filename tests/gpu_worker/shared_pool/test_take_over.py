"""A second runner takes the pool of a first one over: same tokens and hidden states, and nothing damaged is believed.

The truth is an undisturbed run, and float64.
"""

import errno
import mmap
import os
from dataclasses import replace

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.shared_pool.device_pool import DevicePool
from gpu_worker.shared_pool.region import Region
from tests.gpu_worker.plans import Moves, TinyCore
from tests.gpu_worker.rig import Recording, Rig
from tests.gpu_worker.shared_pool.machines import (
    CPU,
    PAGE,
    PROMPT,
    SPEC,
    Host,
    assert_undisturbed,
    damage,
    order_of,
    served,
    taken,
    taking,
)

# Generation and first step of a second and a third scheduler with a journal, and the largest that frames can hold.
NUMBERS = [(2**32 + 1, 1), (2**33 + 1, 2**32), (2**64 - 2, 2**64 - 3)]


@pytest.fixture
def host() -> Host:
    return Host()


def test_pages_are_read_where_the_first_runner_wrote_them(machine: Host) -> None:
    first, second = machine.rig(is_whole=True), machine.rig()
    core, own = served(first), second.runner.pool.pool_id
    machine.dies(first)
    pool = second.runner.pool
    assert not isinstance(pool, DevicePool) or not pool.is_whole
    after, outcome = taking(second, core, 3, order_of(first))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    assert outcome.pool_id == first.runner.pool.pool_id == second.runner.pool.pool_id
    assert own not in machine.holder.memories
    second.runner.report_pages(join := pb.Join(pool_id=own))
    assert join.pool_id == outcome.pool_id
    assert not isinstance(pool, DevicePool) or pool.is_whole
    for _ in range(2 * PAGE):
        second.step(after, decode=[1])
    assert_undisturbed(second, after)


def test_a_third_runner_takes_over_what_the_second_one_wrote(eager: Host) -> None:
    first, second, core = eager.pair()
    after = taken(eager.succeed(first, second, core, 3))
    for _ in range(PAGE):
        second.step(after, decode=[1])
    eager.dies(second)
    third = eager.rig()
    last = taken(taking(third, after, 4, order_of(second, generation=2)))
    assert_undisturbed(third, last)


def test_hidden_states_are_float64_s(eager: Host) -> None:
    first, second, recording = eager.rig(is_whole=True), eager.rig(), Recording()
    core = served(first, 4 * PAGE - 1)
    after = taken(eager.succeed(first, second, core, 4))
    for _ in range(4):
        second.step(after, recording, decode=[1])
    second.check(after, recording)


def test_a_changed_bit_is_found_and_the_pool_zeroed(machine: Host) -> None:
    first, second, core = machine.pair()
    damage(first, core.rows[1].pages[1])
    _, outcome = machine.succeed(first, second, core, 3)
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC
    assert outcome.detail == "page 2 of the pool that was taken over has changed since step 1 filled it"
    assert outcome.pool_id == first.runner.pool.pool_id == second.runner.pool.pool_id
    assert not any(bool(pool.any()) for pool in second.runner.on_device.cache.pools)
    assert_serves(second, core)


def assert_serves(rig: Rig, core: TinyCore) -> None:
    """The rig's next generation computes everything in its zeroed pool."""
    again = TinyCore(core.geometry, generation=3)
    again.add(1, core.rows[1].tokens[:PROMPT])
    rig.step(again, chunks={1: PROMPT})
    rig.step(again, decode=[1])
    assert again.rows[1].tokens[PROMPT] == core.rows[1].tokens[PROMPT]


def test_pages_that_nobody_reads_are_not_checked(machine: Host) -> None:
    first, second, core = machine.pair()
    damage(first, core.rows[1].pages[2])
    after = taken(machine.succeed(first, second, core, 2))
    # A page is checked once.
    damage(second, core.rows[1].pages[0])
    after.add(2, after.rows[1].tokens[: 2 * PAGE + 1], shared=core.rows[1].pages[:2], position=2 * PAGE)
    assert second.submit(after.plan(decode=[2])).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(("generation", "step"), NUMBERS)
def test_plans_of_any_number_leave_whole_pages(eager: Host, generation: int, step: int) -> None:
    first, second, core = eager.pair(generation=generation, step=step)
    damage(first, core.rows[1].pages[1])
    after = taken(eager.succeed(first, second, core, 1, generation))
    after.add(2, after.rows[1].tokens[: 2 * PAGE + 1], shared=core.rows[1].pages[:2], position=2 * PAGE)
    outcome = second.submit(after.plan(chunks={2: 1}))
    assert outcome.detail == f"page 2 of the pool that was taken over has changed since step {step} filled it"


@pytest.mark.parametrize("num_prompt", [3 * PAGE, 3 * PAGE - 1, 3 * PAGE - 2])
def test_a_page_that_a_chunk_or_a_decode_fills_to_its_end_is_whole(host: Host, num_prompt: int) -> None:
    first, second, core = host.pair(num_prompt)
    taken(host.succeed(first, second, core, 3))


def test_a_page_that_is_not_full_is_refused(machine: Host) -> None:
    first, second, core = machine.pair(2 * PAGE + 5)
    core.rows[1].tokens += range(PAGE)
    _, outcome = machine.succeed(first, second, core, 3)
    refused = pb.STEP_STATUS_OUT_OF_SYNC, "page 3 of the pool that was taken over is not whole"
    assert (outcome.status, outcome.detail) == refused


def test_a_page_that_a_later_step_began_to_write_is_refused(machine: Host) -> None:
    """The first runner zeroes a page in a step that it never confirmed."""
    first, second, core = machine.pair()
    first.step(core, decode=[1], moves=Moves(zero=[core.rows[1].pages[0]]))
    _, outcome = machine.succeed(first, second, core, 3)
    assert outcome.detail == "page 1 of the pool that was taken over is not whole"


def test_a_pool_in_use_is_refused_and_the_own_pool_stays(machine: Host) -> None:
    first, second = machine.rig(is_whole=True), machine.rig()
    core, own = served(first), second.runner.pool.pool_id
    _, outcome = taking(second, core, 2, order_of(first))
    assert (outcome.status, outcome.detail) == (pb.STEP_STATUS_OUT_OF_SYNC, "process 7 still uses the pool")
    assert outcome.pool_id == own and own in machine.holder.memories


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
def test_a_header_that_differs_is_refused(host: Host, generation: int, offset: int | None, words: str) -> None:
    first, second = host.rig(), host.rig()
    core, own = served(first), second.runner.pool.pool_id
    if offset is not None:
        with mmap.mmap(host.holder.memories[first.runner.pool.pool_id], 0) as content:
            content[offset] ^= 1
    _, outcome = host.succeed(first, second, core, 2, generation)
    assert outcome.status == pb.STEP_STATUS_OUT_OF_SYNC and outcome.detail.startswith(words), outcome.detail
    assert second.runner.pool.pool_id == own


def test_another_shape_or_window_has_another_layout(host: Host) -> None:
    specs = SPEC, replace(SPEC, num_pages=14), replace(SPEC, bound=(30, 2))
    assert len({host.rig(spec=spec).runner.pool.layout for spec in specs}) == 3


def test_a_worker_without_a_shared_pool_says_so() -> None:
    rig = Rig(SPEC, CPU)
    core = rig.core()
    core.add(1, rig.prompt(5, seed=1))
    message = core.plan(chunks={1: 5})
    message.take_over.pool_id = bytes(16)
    outcome = rig.submit(message)
    refused = pb.STEP_STATUS_OUT_OF_SYNC, "the pool of this worker is not in shared memory"
    assert (outcome.status, outcome.detail) == refused


def test_a_pool_that_cannot_be_mapped_is_out_of_sync_and_the_own_one_is_zeroed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, core = host.pair()
    # Its own pool is not zero either.
    served(second)
    host.dies(first)

    def fail(region: Region, memory: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(Region, "replace", fail)
    _, outcome = taking(second, core, 3, order_of(first))
    assert (outcome.status, outcome.detail) == (
        pb.STEP_STATUS_OUT_OF_SYNC,
        "the pool of a dead worker cannot be mapped: [Errno 12] Cannot allocate memory",
    )
    assert not any(pool.any() for pool in second.runner.on_device.cache.pools)


def test_a_new_session_zeroes_the_pool_and_frees_its_memory(host: Host) -> None:
    rig = host.rig()
    served(rig)
    memory = host.holder.memories[rig.runner.pool.pool_id]
    before = os.fstat(memory).st_blocks
    rig.runner.join(pb.Joined(generation=9))
    assert os.fstat(memory).st_blocks < before
    assert not any(pool.any() for pool in rig.runner.on_device.cache.pools)
