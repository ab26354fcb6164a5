"""Spans of pages and blocks against their positions, counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.attention.views import View
from tests.gpu_worker.plans import geometry_of


@st.composite
def views(draw: st.DrawFn) -> View:
    geometry = geometry_of(
        page_size=draw(st.sampled_from([16, 32, 64])),
        max_length=draw(st.integers(2, 400)),
        token_budget=512,
        chunk_align=draw(st.sampled_from([16, 32, 64, 128])),
    )
    window = draw(st.none() | st.integers(1, 300))
    sink_tokens = 0 if window is None else draw(st.just(0) | st.integers(1, 100))
    return View.of(
        AttentionPattern(window=window, sink_tokens=sink_tokens, has_learned_sinks=draw(st.booleans())),
        geometry,
        decode_block=draw(st.sampled_from([None, 8, 16, 64])),
    )


def seen_positions(view: View, position: int) -> set[int]:
    window = view.pattern.window or position + 1
    sink_tokens = set(range(min(view.pattern.sink_tokens, position + 1)))
    return sink_tokens | set(range(max(0, position - window + 1), position + 1))


def seen_parts(view: View, position: int, size: int) -> tuple[set[int], set[int]]:
    """Pages, or blocks, of `size` positions of which a query at `position` sees some positions, and all positions."""
    positions = seen_positions(view, position)
    parts = {at // size for at in positions}
    whole = {part for part in parts if positions >= set(range(part * size, (part + 1) * size))}
    return parts, whole


def listed_parts(count: int, num_of_sinks: int, skipped: int) -> list[int]:
    """The pages, or blocks, as masks list them: those of sink tokens, and later ones after a gap."""
    return [nth + (skipped if nth >= num_of_sinks else 0) for nth in range(count)]


@given(views(), st.data())
def test_a_decode_row_lists_the_blocks_with_visible_positions(view: View, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, view.pages_per_row * view.page_size - 1))
    spans = view.decode_spans(np.array([position]))
    count, size = int(spans.num_blocks[0]), view.decode_block
    assert view.page_size == view.blocks_per_page * size
    listed = listed_parts(count, view.sink_token_blocks, int(spans.skipped[0]))
    assert set(listed) == seen_parts(view, position, size)[0]
    assert count <= view.max_decode
    # Hidden positions of the listed blocks: part of one block, and the end of the last block of sink tokens.
    start, end = int(spans.gap_start[0]), int(spans.gap_end[0])
    assert start // size == end // size
    hidden = set(range(start, end))
    if spans.cuts_sink_tokens[0]:
        hidden |= set(range(view.pattern.sink_tokens, view.sink_token_blocks * size))
    in_blocks = {block * size + offset for block in listed for offset in range(size)}
    assert {at for at in in_blocks if at <= position} - hidden == seen_positions(view, position)


@given(views(), st.data())
def test_a_tile_lists_each_page_once_and_as_full_if_every_query_sees_it_whole(view: View, data: st.DataObject) -> None:
    end = view.pages_per_row * view.page_size
    first = data.draw(st.integers(0, end - 1))
    last = data.draw(st.integers(first, min(end, first + view.q_block) - 1))
    spans = view.tile_spans(np.array([first]), np.array([last]))
    num_full, num_partial = int(spans.num_full[0]), int(spans.num_partial[0])
    assert num_full <= view.max_full
    assert num_partial <= view.max_partial == spans.partial_pages.shape[1]
    full = listed_parts(num_full, view.full_sink_token_pages, int(spans.skipped[0]))
    partial = spans.partial_pages[0, :num_partial].tolist()
    per_query = [seen_parts(view, position, view.page_size) for position in range(first, last + 1)]
    assert sorted(full + partial) == sorted(set().union(*(pages for pages, _ in per_query)))
    assert set(full) == set.intersection(*(whole for _, whole in per_query))


@pytest.mark.parametrize(
    ("window", "sink_tokens", "pages", "blocks"),
    [
        *((None, 0, 7, 14), (1, 0, 1, 1), (2, 0, 2, 2), (16, 0, 2, 3), (17, 0, 2, 3), (18, 0, 3, 4)),
        *((96, 0, 7, 13), (500, 0, 7, 14), (1, 1, 2, 2), (16, 16, 3, 5), (16, 17, 4, 6), (96, 1, 7, 14)),
    ],
)
def test_a_window_bounds_the_blocks_of_a_decode_row(
    window: int | None, sink_tokens: int, pages: int, blocks: int
) -> None:
    geometry = geometry_of(chunk_align=32)
    pattern = AttentionPattern(window=window, sink_tokens=sink_tokens)
    assert View.of(pattern, geometry).max_decode == pages
    assert View.of(pattern, geometry, decode_block=8).max_decode == blocks
