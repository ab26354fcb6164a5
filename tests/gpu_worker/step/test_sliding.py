"""Pages behind a row's window are given to other rows while it continues, because nothing reads them."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from tests.gpu_worker.plans import Moves, Sequence_, TinyCore
from tests.gpu_worker.rig import Recording, Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS

# Every layer has a window: its own, or that of the setting, with sink tokens.
SLIDING = [spec for spec in SPECS if spec.family == "mistral" or spec.bound]


@pytest.fixture(params=SLIDING, ids=str)
def rig(request: pytest.FixtureRequest, rig_of: Callable[[RigSpec], Rig]) -> Iterator[Rig]:
    rig = rig_of(request.param)
    yield rig
    rig.forget()


def reach(rig: Rig) -> tuple[int, int]:
    """The window and the sink tokens, from the spec alone."""
    return rig.spec.bound or (rig.spec.window or 0, 0)


def behind(rig: Rig, position: int) -> list[int]:
    """Logical pages without a position that a query at `position` or later sees."""
    window, sink_tokens = reach(rig)
    page_size = rig.geometry.page_size
    pages = range(-(-sink_tokens // page_size), rig.geometry.pages_per_row)
    return [page for page in pages if (page + 1) * page_size <= position - window + 1]


def middling(rig: Rig) -> int:
    """Tokens of a text that exceeds the window and still fits the pool."""
    return min(rig.geometry.max_length, (rig.geometry.num_pages - 3) * rig.geometry.page_size)


def test_the_window_is_the_widest_of_all_layers(rig: Rig) -> None:
    geometry = rig.runner.geometry
    assert (geometry.window, geometry.sink_tokens) == reach(rig)


def test_geometry_has_no_window_if_a_layer_sees_everything(rig_of: Callable[[RigSpec], Rig]) -> None:
    for spec in (SPECS[0], next(spec for spec in SPECS if spec.family == "gemma2" and not spec.bound)):
        geometry = rig_of(spec).runner.geometry
        assert (geometry.window, geometry.sink_tokens) == (0, 0)


def test_a_row_continues_while_others_use_its_first_pages(rig: Rig) -> None:
    """Chunks, then decode steps to the longest sequence, which may be longer than the pool; before each step NaN stands
    wherever the row sees nothing of, until another row or itself writes there."""
    page_size, length = rig.geometry.page_size, rig.geometry.max_length
    core, recording = rig.core(), Recording()
    first = core.add(1, [])
    # Whole pages, so that computing them overwrites the NaN.
    first.num_prompt = (length - 2 * page_size) // page_size * page_size
    first.tokens = rig.prompt(first.num_prompt, seed=1)
    given = 0
    rows = count(2)

    def give_away() -> list[int]:
        """Rows that start on pages that fell behind row 1's window."""
        nonlocal given
        free = [first.pages[col] for col in behind(rig, first.position) if col < len(first.pages)][given:]
        given += len(free)
        rig.spoil(*free)
        started = []
        for page in free:
            core.free_pages.insert(0, page)
            row = next(rows) % 2 + 2
            if row in started:
                continue
            if row in core.rows:
                core.free(core.rows[row])
                rig.spoil(*core.rows[row].pages)
            core.add(row, rig.prompt(page_size, seed=given))
            assert core.rows[row].pages == [page]
            started.append(row)
        return started

    while first.position < first.num_prompt:
        others = give_away()
        rig.step(core, recording, chunks={1: page_size, **dict.fromkeys(others, page_size)})
    while len(first.tokens) < length:
        others, at_edge = give_away(), len(first.tokens) - 1 == len(first.pages) * page_size
        moves = Moves(zero=core.free_pages[:1]) if at_edge else None
        rig.step(core, recording, chunks=dict.fromkeys(others, page_size), decode=[1], moves=moves)
    assert given == len(behind(rig, length - 1)) > 1
    assert (len(first.pages) > rig.geometry.num_pages) == (rig.spec.max_length is not None)
    rig.check(core, Recording(hidden={at: state for at, state in recording.hidden.items() if at[0] == 1}))


@pytest.mark.parametrize("as_decode_row", [True, False], ids=["decode", "chunk"])
def test_a_row_starts_without_the_pages_before_its_window(rig: Rig, as_decode_row: bool) -> None:
    """The row resumes on its remaining pages; 0 replaces the others, and page 0 is filled with NaN."""
    page_size = rig.geometry.page_size
    length = middling(rig) - page_size // 2
    core, recording = rig.core(), Recording()
    first = core.add(1, rig.prompt(length, seed=2))
    rig.step(core, chunks={1: length})
    again = resumed(rig, core, first, length if as_decode_row else length - page_size - 3)
    assert again.pages.count(0) == len(behind(rig, again.position)) > 0
    rig.spoil(0, *(first.pages[col] for col in behind(rig, again.position)))
    if as_decode_row:
        rig.step(core, recording, decode=[3])
    else:
        rig.step(core, recording, chunks={3: page_size})
        rig.step(core, recording, chunks={3: len(again.tokens) - again.position})
    for _ in range(3):
        rig.step(core, recording, decode=[3])
    rig.check(core, recording)


def resumed(rig: Rig, core: TinyCore, first: Sequence_, position: int) -> Sequence_:
    """`first` in row 3, from `position` on, on its own pages except those behind the window."""
    left = list(first.pages)
    for col in behind(rig, position):
        left[col] = 0
    return core.add(3, first.tokens, shared=left, position=position)


def test_a_missing_page_inside_the_window_is_refused(rig: Rig) -> None:
    """One missing page too many, at the window or among those of sink tokens."""
    window, sink_tokens = reach(rig)
    page_size = rig.geometry.page_size
    length = middling(rig) - 2
    hidden = behind(rig, length - 1)
    for col in (0 if sink_tokens else hidden[-1] + 1, hidden[-1] + 1):
        core = rig.core()
        sequence = core.add(1, rig.prompt(length, seed=3), position=length - 1)
        sequence.pages[col] = 0
        outcome = rig.submit(core.plan(decode=[1]))
        assert outcome.status == pb.STEP_STATUS_FAILED
        expected = f"started.pages holds 0 for page {col} of row 1, but position {length - 1} sees it: the window "
        assert outcome.detail == expected + f"is {window}, sink_tokens {sink_tokens}"
    core = rig.core()
    sequence = core.add(1, rig.prompt(length, seed=3), position=length - 1)
    for col in hidden:
        sequence.pages[col] = 0
    assert np.count_nonzero(sequence.pages) * page_size >= window
    assert rig.submit(core.plan(decode=[1])).status == pb.STEP_STATUS_OK


def test_pages_inside_and_outside_the_window_can_be_shared(rig: Rig) -> None:
    """A hit of a long prefix, of which only the pages inside the window are sent."""
    page_size = rig.geometry.page_size
    tokens = rig.prompt(middling(rig) - 4, seed=4)
    core, recording = rig.core(), Recording()
    first = core.add(1, tokens)
    rig.step(core, chunks={1: len(tokens)})
    known = (len(tokens) - 1) // page_size * page_size
    shared = [0 if col in behind(rig, known) else page for col, page in enumerate(first.pages[: known // page_size])]
    assert 0 in shared
    rig.spoil(0, *(first.pages[col] for col in behind(rig, known)))
    core.add(2, [*tokens[:known], *rig.prompt(2, seed=5)], shared=shared, position=known)
    rig.step(core, recording, chunks={2: 2})
    rig.step(core, recording, decode=[2, 1])
    rig.check(core, recording)
