"""Row tables: worker.proto's checksum is updated incrementally; invalid work for a row is refused."""

import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.arrays import Int64Array
from gpu_worker.layout.row_tables import Feature, RowTables
from gpu_worker.step.device_model import DeviceTables
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker import plans
from tests.gpu_worker.plans import TinyCore, geometry_of

GEOMETRY = geometry_of(num_pages=64, max_rows=6, max_length=160, token_budget=256)


def follow(core: TinyCore, tables: RowTables, **running: object) -> Int64Array:
    """The tables follow the core's next plan."""
    plan = read_plan(core.plan(**running), GEOMETRY)
    edits = tables.apply(plan)
    tables.check(plan)
    tables.advance(plan)
    return edits


def test_checksum_matches_the_formula_by_hand() -> None:
    """Row 2 on pages 5 and 9, at position 20, with the formula written out."""
    core = TinyCore(GEOMETRY, page_order=[5, 9])
    core.add(2, [1] * 20)
    tables = RowTables(GEOMETRY)
    follow(core, tables, chunks={2: 20})
    weight = plans.mix(2 << 40 ^ 0xFFFFF) | 1
    expected = 20 * weight + plans.mix(2 << 40 ^ 0 << 20 ^ 5) + plans.mix(2 << 40 ^ 1 << 20 ^ 9)
    assert tables.checksum == expected % 2**64
    # A new generation begins with empty tables.
    tables.reset()
    assert tables.checksum == 0


def started_tables(core: TinyCore) -> RowTables:
    tables = RowTables(GEOMETRY)
    core.add(1, [3] * 20)
    follow(core, tables, chunks={1: 10})
    return tables


@pytest.mark.parametrize(
    ("rows", "starts", "counts", "samples", "problem"),
    [
        ([2], [0], [4], [0], "row 2 was never started"),
        ([1], [9], [4], [0], "row 1 has a chunk that does not start at its next position"),
        ([1], [10], [11], [1], "row 1 has a chunk that ends past the tokens that it started with"),
        ([1], [10], [10], [0], "row 1 has a wrong value in chunk_samples"),
        ([1], [10], [3], [1], "row 1 has a wrong value in chunk_samples"),
    ],
)
def test_chunks_that_a_row_cannot_compute_are_refused(
    rows: list[int], starts: list[int], counts: list[int], samples: list[int], problem: str
) -> None:
    core = TinyCore(GEOMETRY)
    tables = started_tables(core)
    message = core.plan(chunks={1: 1})
    message.chunks.rows, message.chunks.starts = plans.int32(rows), plans.int32(starts)
    message.chunks.counts, message.chunks.samples = plans.int32(counts), bytes(samples)
    with pytest.raises(PlanError, match=problem):
        tables.check(read_plan(message, GEOMETRY))


@pytest.mark.parametrize(("row", "problem"), [(3, "never started"), (1, "not that of its last token")])
def test_decode_rows_that_cannot_decode_are_refused(row: int, problem: str) -> None:
    core = TinyCore(GEOMETRY)
    tables = started_tables(core)
    message = core.plan(chunks={1: 1})
    message.ClearField("chunks")
    message.decode_rows = plans.int32([row])
    with pytest.raises(PlanError, match=problem):
        tables.check(read_plan(message, GEOMETRY))


def test_a_decode_without_a_page_is_refused() -> None:
    core = TinyCore(GEOMETRY)
    core.add(1, [3] * 16)
    tables = RowTables(GEOMETRY)
    follow(core, tables, chunks={1: 16})
    message = core.plan(decode=[1])
    message.ClearField("appends")
    with pytest.raises(PlanError, match="row 1 has too few pages"):
        tables.check(read_plan(message, GEOMETRY))


def test_appends_of_several_pages_to_a_row_are_in_order() -> None:
    """Row 1 gets pages 9 and 4, and row 2 gets page 3 between them."""
    core = TinyCore(GEOMETRY)
    core.add(1, [3] * 16)
    core.add(2, [3] * 16)
    tables = RowTables(GEOMETRY)
    follow(core, tables, chunks={1: 16, 2: 16})
    before = tables.checksum
    message = pb.StepPlan(generation=1, step=2)
    message.appends.rows, message.appends.pages = plans.int32([1, 2, 1]), plans.int32([9, 3, 4])
    edits = tables.apply(read_plan(message, GEOMETRY))
    assert tables.num_pages[[1, 2]].tolist() == [3, 2]
    assert tables.page_table[1, :3].tolist() == [1, 9, 4]
    assert tables.page_table[2, :2].tolist() == [2, 3]
    assert list(zip(*edits, strict=True)) == [(1, 1, 9), (2, 1, 3), (1, 2, 4)]
    terms = [plans.mix(row << 40 ^ col << 20 ^ page) for row, col, page in ((1, 1, 9), (2, 1, 3), (1, 2, 4))]
    assert tables.checksum == (before + sum(terms)) % 2**64


@pytest.mark.parametrize(
    ("rows", "problem"),
    [([1, 3, 1], "row 3, which was never started"), ([1] * 10 + [3], "row 1 gets page 11; the limit is 10")],
)
def test_appends_that_a_row_cannot_have_are_refused(rows: list[int], problem: str) -> None:
    """The first of them is named."""
    tables = started_tables(TinyCore(GEOMETRY))
    message = pb.StepPlan(generation=1, step=2)
    message.appends.rows, message.appends.pages = plans.int32(rows), plans.int32(range(20, 20 + len(rows)))
    with pytest.raises(PlanError, match=problem):
        tables.apply(read_plan(message, GEOMETRY))


def test_device_tables_follow_the_plans(device: torch.device) -> None:
    core, tables = TinyCore(GEOMETRY, page_order=[7, 4, 2]), RowTables(GEOMETRY)
    on_device = DeviceTables(GEOMETRY, device)
    core.add(5, [1] * 30)
    for kwargs in ({"chunks": {5: 30}}, {"decode": [5]}, {"decode": [5]}, {"decode": [5]}):
        edits = follow(core, tables, **kwargs)
        on_device.set_pages(torch.from_numpy(edits).to(device))
    assert on_device.pages[5, :3].tolist() == [7, 4, 2]
    assert on_device.logical_of_page[[7, 4, 2]].tolist() == [0, 1, 2]


def test_features_of_a_row_last_until_restart_or_reset() -> None:
    core, tables = TinyCore(GEOMETRY), RowTables(GEOMETRY)

    def start(row: int, **asks: object) -> int:
        core.add(row, [1, 2, 3], **asks)
        tables.apply(read_plan(core.plan(chunks={row: 3}), GEOMETRY))
        return int(tables.features.uses[row])

    assert start(1) == 0
    assert start(2, banned=[4], banned_until=9) == Feature.BANS
    assert start(3, banned=[4]) == 0
    assert (
        start(4, biases={3: 1.0}, presence_penalty=0.1, allowed=[1])
        == Feature.BIASES | Feature.PENALTIES | Feature.ALLOWED
    )
    assert start(5, num_logprobs=1, prompt_logprobs_from=2) == Feature.LOGPROBS | Feature.PROMPT_LOGPROBS
    assert start(6, repetition_penalty=1.0, frequency_penalty=0.0, num_logprobs=0) == 0
    assert start(4, num_logprobs=2) == Feature.LOGPROBS
    assert tables.features.uses[2] == Feature.BANS
    tables.reset()
    assert not tables.features.uses.any()


@pytest.mark.parametrize(
    ("max_rows", "budget", "rows"), [(32, 512, 320), (6, 256, 256), (3, 67, 67), (256, 4096, 512), (100, 4096, 384)]
)
def test_logit_rows_cover_every_row_and_a_chunk(max_rows: int, budget: int, rows: int) -> None:
    geometry = geometry_of(page_size=64, max_rows=max_rows, token_budget=budget, chunk_align=64)
    assert geometry.logit_rows == rows
    assert rows >= max_rows + 64
