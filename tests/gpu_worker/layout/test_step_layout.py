"""Inputs of padded steps, and checksums, equal those of plain loops over the tiny core's rows."""

import random

import numpy as np
import pytest

from gpu_worker.arrays import Space
from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.attention.views import View
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.step_layout import MAX_STATIC_EDITS, StepInputs, StepLayout, StepShape, allocated, lay_out
from gpu_worker.trees import leaves
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker.plans import TinyCore, geometry_of

GEOMETRY = geometry_of(page_size=32, num_pages=400, max_rows=9, max_length=400, token_budget=256)
VIEWS = (View.of(AttentionPattern(), GEOMETRY, decode_block=16),)
SHAPES = Shapes.of(GEOMETRY)
GARBAGE = -77


def garbage(need: StepShape) -> tuple[StepShape, StepInputs]:
    shape = SHAPES.fitting(need)
    inputs = allocated(shape, GEOMETRY, VIEWS, Space())
    for array in leaves(inputs):
        array[...] = GARBAGE
    return shape, inputs


def token_slot(pages: list[int], position: int) -> int:
    return pages[position // 32] * 32 + position % 32


class Loops:
    """A tiny core with the tokens that the worker's host knows."""

    def __init__(self) -> None:
        self.core, self.tables = TinyCore(GEOMETRY), RowTables(GEOMETRY)
        self.num_started: dict[int, int] = {}

    def add(self, row: int, num_tokens: int, draw: random.Random) -> None:
        sampling = {"temperature": 0.5, "top_k": row + 1, "seed": 2**64 - row} if row % 2 else {}
        self.core.add(row, [draw.randrange(50) for _ in range(num_tokens)], **sampling)
        self.num_started[row] = num_tokens

    def step(self, chunks: dict[int, int], decode: list[int]) -> StepLayout:
        """Lays a plan out and compares it."""
        before = {row: self.core.rows[row].position for row in (*chunks, *decode)}
        plan = read_plan(self.core.plan(chunks=chunks, decode=decode, next_token=49), GEOMETRY)
        edits = self.tables.apply(plan)
        self.tables.check(plan)
        layout = lay_out(plan, edits, self.tables, VIEWS, garbage)
        self.tables.advance(plan)
        assert self.tables.checksum == plan.checksum
        for row in (*chunks, *decode):
            pages = self.core.rows[row].pages
            assert self.tables.page_table[row, : self.tables.num_pages[row]].tolist() == pages
        self._compare_tokens(layout, chunks, decode, before)
        self._compare_decode(layout, decode, before)
        self._compare_prefill(layout, chunks)
        self._compare_samples(layout, chunks, decode)
        edited = list(zip(*edits.tolist(), strict=True))
        if edited:
            entries = layout.inputs.edits if layout.has_static_edits else layout.extras.edits
            padding = [(0, 0, 0)] * (MAX_STATIC_EDITS - len(edited) if layout.has_static_edits else 0)
            assert list(zip(*entries.tolist(), strict=True)) == edited + padding
        return layout

    def _compare_tokens(
        self, layout: StepLayout, chunks: dict[int, int], decode: list[int], before: dict[int, int]
    ) -> None:
        expected: list[tuple[int, int, int]] = []
        for row in decode:
            position, own = before[row], self.core.rows[row]
            known = position < self.num_started[row]
            expected.append((own.tokens[position] if known else -1, position, token_slot(own.pages, position)))
        expected += [(0, 0, 0)] * (layout.shape.decode - len(decode))
        for row, count in chunks.items():
            own = self.core.rows[row]
            positions = range(before[row], before[row] + count)
            expected += [(own.tokens[at], at, token_slot(own.pages, at)) for at in positions]
        expected += [(0, 0, 0)] * (layout.shape.tokens - len(expected))
        inputs = layout.inputs
        found = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.kv_slots.tolist(), strict=True)
        assert list(found) == expected

    def _compare_decode(self, layout: StepLayout, decode: list[int], before: dict[int, int]) -> None:
        part = layout.inputs.decode
        if part is None:
            assert not decode
            return
        idle = layout.shape.decode - len(decode)
        slots = [token_slot(self.core.rows[row].pages, before[row]) for row in decode]
        assert part.rows.tolist() == decode + [0] * idle
        assert part.last_slot.tolist() == slots + [0] * idle
        assert part.block_end.tolist() == [slot // 16 * 16 + 16 for slot in slots] + [16] * idle
        assert part.blocks[0].num_blocks.tolist() == [before[row] // 16 + 1 for row in decode] + [0] * idle

    def _compare_prefill(self, layout: StepLayout, chunks: dict[int, int]) -> None:
        """A token's place along the query axis is that of its position, and padding has masked places of its own."""
        part, num = layout.inputs.prefill, sum(chunks.values())
        if part is None:
            assert not chunks
            return
        positions = layout.inputs.positions[layout.shape.decode :]
        assert len(set(part.places.tolist())) == part.places.size == positions.size
        assert part.q_positions[part.places].tolist() == [*positions[:num].tolist(), *[-1] * (positions.size - num)]
        assert np.count_nonzero(part.q_positions >= 0) == num
        tiles = [row for row, count in chunks.items() for _ in range(-(-count // 16))]
        assert part.rows.tolist() == tiles + [0] * (part.rows.size - len(tiles))
        assert part.blocks[0].num_full[len(tiles) :].tolist() == [0] * (part.rows.size - len(tiles))
        assert (
            not part.blocks[0].num_partial[len(tiles) :].any() and not part.blocks[0].partial_pages[len(tiles) :].any()
        )

    def _compare_samples(self, layout: StepLayout, chunks: dict[int, int], decode: list[int]) -> None:
        kept: list[int] = []
        end = layout.shape.decode
        for row, count in chunks.items():
            end += count
            if row in self.core.sampled:
                kept.append(end - 1)
        kept += range(len(decode))
        idle = layout.shape.samples - len(kept)
        samples = layout.inputs.samples
        assert layout.num_samples == len(kept)
        assert samples.rows.tolist() == self.core.sampled + [0] * idle
        assert samples.kept.tolist() == kept + [0] * idle
        drawing = samples.drawing
        assert (drawing is not None) == layout.shape.draws
        if drawing is not None:
            sampled, draws = self.core.sampled, [row % 2 for row in self.core.sampled]
            assert drawing.temperature.tolist() == [0.5 * one for one in draws] + [0] * idle
            top_k = [(row + 1) * one for row, one in zip(sampled, draws, strict=True)]
            assert drawing.top_k.tolist() == top_k + [0] * idle
            assert drawing.seed.tolist() == [-row * one for row, one in zip(sampled, draws, strict=True)] + [0] * idle
            # The token that the step samples is the core's last one already.
            assert drawing.position.tolist()[: len(sampled)] == [len(self.core.rows[row].tokens) - 1 for row in sampled]


@pytest.mark.parametrize("seed", range(4))
def test_inputs_equal_those_of_plain_loops(seed: int) -> None:
    draw, loops = random.Random(seed), Loops()
    shapes = set[StepShape]()
    for _ in range(80):
        rows = loops.core.rows
        row = draw.randint(1, GEOMETRY.max_rows)
        if draw.random() < 0.4 and (row not in rows or len(rows[row].tokens) > 60):
            if row in rows:
                loops.core.free(rows[row])
            loops.add(row, draw.choice((1, 16, 31, 32, 33, draw.randint(1, 120))), draw)
        chunks: dict[int, int] = {}
        decode: list[int] = []
        share = draw.choice((0, 0.3, 0.9))
        for row, own in rows.items():
            left = len(own.tokens) - own.position
            if left == 1 and draw.random() < share:
                decode.append(row)
            elif left > 1 and len(chunks) < 2:
                chunks[row] = draw.randint(1, min(left, 60))
        draw.shuffle(decode)
        if chunks or decode:
            shapes.add(loops.step(chunks, decode).shape)
    assert len(shapes) > 4


def test_more_entries_of_the_page_table_than_fit_in_the_inputs() -> None:
    """Four rows start with 12 pages each."""
    draw, loops = random.Random(1), Loops()
    for row in (1, 2, 3, 4):
        loops.add(row, 380, draw)
    assert not loops.step({1: 20, 2: 20, 3: 20, 4: 20}, []).has_static_edits
    assert loops.step({1: 30, 2: 20}, []).extras.edits is None
    loops.add(5, 40, draw)
    assert loops.step({1: 30, 5: 40}, []).has_static_edits
