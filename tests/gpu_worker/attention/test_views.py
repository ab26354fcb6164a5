"""Spans of pages against their positions, counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.attention.views import View
from gpu_worker.geometry import Geometry


@st.composite
def views(draw: st.DrawFn) -> View:
    geometry = Geometry(
        page_size=draw(st.sampled_from([16, 32, 64])),
        num_pages=20,
        max_rows=2,
        max_length=draw(st.integers(2, 400)),
        token_budget=512,
        chunk_align=draw(st.sampled_from([16, 32, 64, 128])),
        vocab_size=9,
    )
    window = draw(st.none() | st.integers(1, 300))
    sink_tokens = 0 if window is None else draw(st.just(0) | st.integers(1, 100))
    return View.of(
        AttentionPattern(window=window, sink_tokens=sink_tokens, has_learned_sinks=draw(st.booleans())), geometry
    )


def seen_positions(view: View, position: int) -> set[int]:
    window = view.pattern.window or position + 1
    sink_tokens = set(range(min(view.pattern.sink_tokens, position + 1)))
    return sink_tokens | set(range(max(0, position - window + 1), position + 1))


def seen_pages(view: View, position: int) -> tuple[set[int], set[int]]:
    """Pages of which a query at `position` sees some positions, and all positions."""
    positions = seen_positions(view, position)
    pages = {at // view.page_size for at in positions}
    whole = {page for page in pages if positions >= set(range(page * view.page_size, (page + 1) * view.page_size))}
    return pages, whole


def listed_pages(count: int, num_sink_pages: int, skipped: int) -> list[int]:
    """The pages as masks list them: those of sink tokens, and later ones after a gap."""
    return [nth + (skipped if nth >= num_sink_pages else 0) for nth in range(count)]


@given(views(), st.data())
def test_a_decode_row_lists_the_pages_with_visible_positions(view: View, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, view.pages_per_row * view.page_size - 1))
    spans = view.decode_spans(np.array([position]))
    count = int(spans.num_pages[0])
    listed = listed_pages(count, view.sink_token_pages, int(spans.skipped[0]))
    assert set(listed) == seen_pages(view, position)[0]
    assert count <= view.max_decode
    # Hidden positions of the listed pages: part of one page, and the end of the last page of sink tokens.
    start, end = int(spans.gap_start[0]), int(spans.gap_end[0])
    assert start // view.page_size == end // view.page_size
    hidden = set(range(start, end))
    if spans.cuts_sink_tokens[0]:
        hidden |= set(range(view.pattern.sink_tokens, view.sink_token_pages * view.page_size))
    in_pages = {page * view.page_size + offset for page in listed for offset in range(view.page_size)}
    assert {at for at in in_pages if at <= position} - hidden == seen_positions(view, position)


@given(views(), st.data())
def test_a_tile_lists_each_page_once_and_as_full_if_every_query_sees_it_whole(view: View, data: st.DataObject) -> None:
    end = view.pages_per_row * view.page_size
    first = data.draw(st.integers(0, end - 1))
    last = data.draw(st.integers(first, min(end, first + view.q_block) - 1))
    spans = view.tile_spans(np.array([first]), np.array([last]))
    num_full, num_partial = int(spans.num_full[0]), int(spans.num_partial[0])
    assert num_full <= view.max_full
    assert num_partial <= view.max_partial == spans.partial.shape[1]
    full = listed_pages(num_full, view.full_sink_token_pages, int(spans.skipped[0]))
    partial = spans.partial[0, :num_partial].tolist()
    per_query = [seen_pages(view, position) for position in range(first, last + 1)]
    assert sorted(full + partial) == sorted(set().union(*(pages for pages, _ in per_query)))
    assert set(full) == set.intersection(*(whole for _, whole in per_query))


@pytest.mark.parametrize(
    ("window", "sink_tokens", "expected"),
    [
        *((None, 0, 7), (1, 0, 1), (2, 0, 2), (16, 0, 2), (17, 0, 2), (18, 0, 3), (96, 0, 7), (500, 0, 7)),
        *((1, 1, 2), (16, 16, 3), (16, 17, 4), (96, 1, 7)),
    ],
)
def test_a_window_bounds_the_pages_of_a_decode_row(window: int | None, sink_tokens: int, expected: int) -> None:
    geometry = Geometry(
        page_size=16, num_pages=20, max_rows=2, max_length=100, token_budget=64, chunk_align=32, vocab_size=9
    )
    assert View.of(AttentionPattern(window=window, sink_tokens=sink_tokens), geometry).max_decode == expected
