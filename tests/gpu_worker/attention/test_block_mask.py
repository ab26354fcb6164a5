"""The visible positions of masks: the conversion against its definition, direct masks against the conversion."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.attention.paged import StepContext
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.step_layout import lay_out
from gpu_worker.step.device_model import DeviceTables
from gpu_worker.trees import mapped
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker.attention.conversion import logical_to_physical
from tests.gpu_worker.attention.small_layers import KIND, layers_of
from tests.gpu_worker.plans import TinyCore, geometry_of
from tests.rigs.padded_shapes import placed_in


def visible(mask: BlockMask) -> Tensor:
    """bool [B, H, Q, KV]: the positions that each query sees if a kernel obeys the block lists."""
    q_block, kv_block = mask.BLOCK_SIZE
    num_q, num_kv = mask.seq_lengths
    batch, heads, num_q_blocks = mask.kv_num_blocks.shape
    out = torch.zeros(batch, heads, num_q, num_kv, dtype=torch.bool)
    lists = [(mask.kv_num_blocks, mask.kv_indices, False)]
    if mask.full_kv_num_blocks is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices, True))
    for counts, indices, is_full in lists:
        for b in range(batch):
            for h in range(heads):
                for tile in range(num_q_blocks):
                    q_idx = torch.arange(tile * q_block, min((tile + 1) * q_block, num_q))
                    for block in indices[b, h, tile, : counts[b, h, tile]].tolist():
                        kv_idx = torch.arange(block * kv_block, min((block + 1) * kv_block, num_kv))
                        seen = torch.ones(len(q_idx), len(kv_idx), dtype=torch.bool)
                        if not is_full:
                            at = (torch.tensor(b), torch.tensor(h), q_idx[:, None], kv_idx[None, :])
                            seen = mask.mask_mod(*at).expand(len(q_idx), len(kv_idx))
                        region = out[b, h, q_idx[0] : q_idx[-1] + 1, kv_idx[0] : kv_idx[-1] + 1]
                        assert not region.any(), "a block is listed twice for a tile"
                        region |= seen
    return out


@pytest.mark.parametrize("window", [None, 40])
def test_each_query_sees_the_same_positions_before_and_after_conversion(window: int | None) -> None:
    page_size, num_pages, length = 16, 24, 112
    order = np.random.default_rng(1).permutation(np.arange(1, num_pages))
    table = torch.from_numpy(np.stack([order[:7], order[7:14], order[14:21]]).astype(np.int64))
    lengths = torch.tensor([112, 50, 3])

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = kv_idx > q_idx - window if window else kv_idx >= 0
        return (q_idx >= kv_idx) & (kv_idx < lengths[b]) & near & (kv_idx % (h + 2) != 1)

    logical = create_block_mask(rule, B=3, H=2, Q_LEN=length, KV_LEN=length, device="cpu", BLOCK_SIZE=(32, page_size))
    seen = visible(logical_to_physical(logical, table, num_pages))
    by_position = visible(logical)
    expected = torch.zeros_like(seen)
    for b in range(3):
        for position in range(length):
            slot = table[b, position // page_size] * page_size + position % page_size
            expected[b, :, :, slot] = by_position[b, :, :, position]
    assert by_position.any()
    assert torch.equal(seen, expected)


PATTERNS = [
    *(AttentionPattern(window=window) for window in (None, 1, 7, 37)),
    *(AttentionPattern(window=window, has_learned_sinks=True) for window in (None, 16, 96)),
    *(
        AttentionPattern(window=window, sink_tokens=sink_tokens)
        for window, sink_tokens in ((1, 1), (7, 16), (40, 5), (20, 70), (64, 64))
    ),
    AttentionPattern(window=9, sink_tokens=17, has_learned_sinks=True),
]


# Decode blocks have 64 positions: with pages of 128 a row lists halves of pages.
SIZES = [
    (16, 64),
    (128, 128),
    *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((16, 16), (64, 64), (64, 32), (256, 128))),
]


@pytest.mark.parametrize(("page_size", "chunk_align"), SIZES)
def test_direct_masks_equal_the_conversion(page_size: int, chunk_align: int) -> None:
    """Mixed steps of decode rows and chunks at unaligned positions."""
    sizes = {"page_size": page_size, "max_length": 6 * page_size, "chunk_align": chunk_align}
    budget = 3 + 2 * align_up(2 * page_size + 6, chunk_align)
    geometry = geometry_of(num_pages=40, max_rows=5, token_budget=budget, **sizes)
    order = np.random.default_rng(page_size).permutation(np.arange(1, 40)).tolist()
    core, tables = TinyCore(geometry, page_order=order), RowTables(geometry)
    cpu = torch.device("cpu")
    shapes, on_device = Shapes.of(geometry), DeviceTables(geometry, cpu, width=40)
    layers = layers_of(*(replace(KIND, num_heads=1, pattern=pattern) for pattern in PATTERNS))
    kernels = FlexKernels(layers, geometry, shapes, on_device, torch.float32)
    place = placed_in(shapes, geometry, kernels.views)
    lengths = {1: page_size, 2: 2 * page_size + 1, 3: page_size - 1, 4: 3 * page_size - 2, 5: 5 * page_size + 5}
    for row, length in lengths.items():
        core.add(row, [1] * length)
    core.rows[5].position = 3 * page_size - 1
    steps = [
        {"chunks": {1: page_size, 3: page_size - 1}},
        {"chunks": {2: page_size + 3}, "decode": [1, 3]},
        {"chunks": {2: page_size - 2, 4: page_size + 5}, "decode": [3, 1]},
        {"chunks": {5: 2 * page_size + 6, 4: 2 * page_size - 7}, "decode": [2, 3, 1]},
        {"chunks": {}, "decode": [5, 2, 4]},
    ]
    for step in steps:
        plan = read_plan(core.plan(**step), geometry)
        edits = tables.apply(plan)
        layout = mapped(lay_out(plan, edits, tables, kernels.views, place), torch.from_numpy)
        page_edits = layout.inputs.edits if layout.has_static_edits else layout.extras.edits
        if page_edits is not None:
            on_device.set_pages(page_edits)
        context = kernels.context(layout.inputs)
        rows = [(row, core.rows[row].pages, int(tables.position[row])) for row in plan.decode_rows.tolist()]
        chunks = [
            (core.rows[row].pages, start, count)
            for row, start, count in zip(
                plan.chunk_rows.tolist(), plan.chunk_starts.tolist(), plan.chunk_counts.tolist(), strict=True
            )
        ]
        for index, pattern in enumerate(PATTERNS):
            if context.decode is not None:
                check_decode(context, index, rows, geometry, pattern)
            if context.prefill is not None:
                check_prefill(context, index, chunks, geometry, pattern)
        tables.advance(plan)


def check_decode(
    context: StepContext,
    index: int,
    rows: list[tuple[int, list[int], int]],
    geometry: Geometry,
    pattern: AttentionPattern,
) -> None:
    mask = context.decode[index].mask.block_mask(1)
    seen = visible(mask)[:, 0, 0]
    expected = torch.zeros_like(seen)
    for slot, (_, pages, position) in enumerate(rows):
        expected[slot] = converted(pages, geometry, position, 1, pattern)
    assert torch.equal(seen, expected)
    # Blocks without visible positions are not read.
    assert torch.equal(mask.kv_num_blocks[:, 0, 0].long(), parts_of(seen, mask.BLOCK_SIZE[1]).sum(-1))


def check_prefill(
    context: StepContext,
    index: int,
    chunks: list[tuple[list[int], int, int]],
    geometry: Geometry,
    pattern: AttentionPattern,
) -> None:
    mask, tile = context.prefill[index].mask.block_mask, geometry.chunk_align
    seen = visible(mask)[0, 0]
    expected = torch.zeros_like(seen)
    places = context.prefill_places.tolist()
    for pages, start, count in chunks:
        own, places = places[:count], places[count:]
        assert own[0] % tile == 0
        expected[own] = converted(pages, geometry, start, count, pattern)
    # Padding tokens take places of masked queries.
    assert (context.prefill[index].mask.q_positions[places] == -1).all()
    # Padding inside a tile may see the tile's full pages, as its result is dropped; tiles of padding see nothing.
    used = torch.zeros(len(seen) // tile, dtype=torch.bool)
    queries = context.prefill_places[: len(context.prefill_places) - len(places)]
    used[queries // tile] = True
    assert torch.equal(seen[queries], expected[queries])
    assert not seen[~used.repeat_interleave(tile)].any()
    listed = (mask.kv_num_blocks + mask.full_kv_num_blocks)[0, 0]
    by_tile = expected.view(len(used), tile, -1).any(1)
    assert torch.equal(listed.long(), parts_of(by_tile, geometry.page_size).sum(-1))


def parts_of(slots: Tensor, size: int) -> Tensor:
    """bool [n, parts of the pool]: the parts of `size` slots with any of bool [n, slots]."""
    return slots.view(len(slots), -1, size).any(-1)


def converted(pages: list[int], geometry: Geometry, start: int, count: int, pattern: AttentionPattern) -> Tensor:
    """bool [count, pool tokens]: the conversion of the logical mask of positions start .. start + count - 1, and the
    first slot after the plans' pages, where the sinks are."""
    num_kv, window = len(pages) * geometry.page_size, pattern.window or geometry.max_length

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx + start >= kv_idx) & ((q_idx + start - window < kv_idx) | (kv_idx < pattern.sink_tokens))

    logical = create_block_mask(
        rule, B=1, H=1, Q_LEN=count, KV_LEN=num_kv, device="cpu", BLOCK_SIZE=(16, geometry.page_size)
    )
    seen = visible(logical_to_physical(logical, torch.tensor([pages]), geometry.num_pages))[0, 0]
    if not pattern.has_learned_sinks:
        return seen
    sinks = torch.zeros(count, geometry.page_size, dtype=torch.bool)
    sinks[:, 0] = True
    return torch.cat([seen, sinks], 1)
