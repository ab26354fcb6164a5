"""Spans of pages against the positions they stand for, counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.attention.layers import Visibility
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
    return View.of(Visibility(window=window, has_sinks=draw(st.booleans())), geometry)


def seen_pages(view: View, position: int) -> tuple[set[int], set[int]]:
    """Pages of which a query at `position` sees anything, and everything."""
    window = view.visibility.window or position + 1
    positions = set(range(max(0, position - window + 1), position + 1))
    pages = {at // view.page_size for at in positions}
    whole = {page for page in pages if positions >= set(range(page * view.page_size, (page + 1) * view.page_size))}
    return pages, whole


@given(views(), st.data())
def test_a_decode_row_spans_the_pages_of_its_window(view: View, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, view.pages_per_row * view.page_size - 1))
    spans = view.decode_spans(np.array([position]))
    first, count = int(spans.first_page[0]), int(spans.num_pages[0])
    assert set(range(first, first + count)) == seen_pages(view, position)[0]
    assert int(spans.first_position[0]) == max(0, position - (view.visibility.window or position + 1) + 1)
    assert count <= view.max_decode


@given(views(), st.data())
def test_a_tile_lists_each_page_once_and_whole_where_every_query_sees_it_whole(view: View, data: st.DataObject) -> None:
    end = view.pages_per_row * view.page_size
    first = data.draw(st.integers(0, end - 1))
    last = data.draw(st.integers(first, min(end, first + view.q_block) - 1))
    spans = view.tile_spans(np.array([first]), np.array([last]))
    num_full, num_partial = int(spans.num_full[0]), int(spans.num_partial[0])
    assert num_full <= view.max_full
    assert num_partial <= view.max_partial == spans.partial.shape[1]
    full = list(range(int(spans.first_full[0]), int(spans.first_full[0]) + num_full))
    partial = spans.partial[0, :num_partial].tolist()
    per_query = [seen_pages(view, position) for position in range(first, last + 1)]
    assert sorted(full + partial) == sorted(set().union(*(pages for pages, _ in per_query)))
    assert set(full) == set.intersection(*(whole for _, whole in per_query))


@pytest.mark.parametrize(
    ("window", "expected"), [(None, 7), (1, 1), (2, 2), (16, 2), (17, 2), (18, 3), (96, 7), (500, 7)]
)
def test_a_window_bounds_the_pages_of_a_decode_row(window: int | None, expected: int) -> None:
    geometry = Geometry(
        page_size=16, num_pages=20, max_rows=2, max_length=100, token_budget=64, chunk_align=32, vocab_size=9
    )
    assert View.of(Visibility(window=window), geometry).max_decode == expected
