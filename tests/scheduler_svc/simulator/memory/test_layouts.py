"""Each layout under random admissions and releases: counters, extents and, for pages, the tokens in them."""

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from scheduler_svc.simulator.layouts import LAYOUTS, Layout, Paged, Sequence, Settings
from tests.scheduler_svc.simulator.memory.asking import audit, covered, extents_of, lengths_of, sequence, settings


class Memory:
    """A model of the tokens in every slot. A token is written if the layout reports it as new, and copied otherwise."""

    def __init__(self, layout: Layout, asked: Settings) -> None:
        self._layout, self._asked = layout, asked
        self._slots: dict[int, int] = {}
        self._places: dict[int, list[int]] = {}

    def admitted(self, of: Sequence, length: int, hit: int) -> None:
        self._places[of.index] = covered(list(extents_of(self._layout)[of.index]))
        for position in range(hit, length):
            self._write(of, position, length)

    def grown(self, of: Sequence, length: int) -> None:
        self._places[of.index] = covered(list(extents_of(self._layout)[of.index]))
        self._write(of, length - 1, length)

    def released(self, of: Sequence) -> None:
        del self._places[of.index]

    def check(self, of: Sequence, length: int) -> None:
        """Asserts that every position of the sequence holds its token."""
        for position in range(length):
            slot = self._places[of.index][position]
            assert self._slots[slot] == of.tokens[position], f"position {position} of sequence {of.index}"

    def _write(self, of: Sequence, position: int, length: int) -> None:
        self._slots[self._places[of.index][position]] = int(of.tokens[position])


asked_for = st.builds(
    settings,
    memory_tokens=st.integers(8, 60),
    reserve=st.integers(3, 14),
    page_size=st.integers(1, 4),
    growth=st.sampled_from([1.0, 1.5, 3.0]),
)
# Prompts of two distinct tokens, so that most share a prefix. A sample has the prompt of another sequence.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
actions = st.lists(st.tuples(st.sampled_from(["arrive", "sample", "again", "grow", "grow", "grow", "release"]),
                             st.integers(0, 99), prompts), min_size=10, max_size=60)  # fmt: skip


class Trial:
    """Sequences that run in one layout, and preempted ones."""

    def __init__(self, layout: Layout, asked: Settings) -> None:
        self.layout, self.asked = layout, asked
        self.memory = Memory(layout, asked) if isinstance(layout, Paged) else None
        self.live: list[tuple[Sequence, int]] = []
        self.preempted: list[tuple[Sequence, int]] = []
        self.count = 0

    def do(self, action: str, choice: int, prompt: list[int]) -> None:
        if action == "arrive" or (action == "sample" and not self.live):
            self.arrive(prompt)
        elif action == "sample":
            of = self.live[choice % len(self.live)][0]
            self.arrive(of.tokens[: of.prompt].tolist())
        elif action == "again" and self.preempted:
            self.admit(*self.preempted.pop(choice % len(self.preempted)))
        elif self.live and action == "grow":
            self.grow(choice % len(self.live))
        elif self.live and action == "release":
            of, length = self.live.pop(choice % len(self.live))
            self.layout.release(of)
            if self.memory:
                self.memory.released(of)
            self.preempted.append((of, length))

    def arrive(self, prompt: list[int]) -> None:
        # Generated tokens differ between sequences, except between some samples.
        tokens = [*prompt, self.count % 2, *((self.count >> k) & 1 for k in range(12))]
        of = sequence(self.count, tokens, prompt=len(prompt))
        self.count += 1
        self.admit(of, of.prompt)

    def admit(self, of: Sequence, length: int) -> None:
        if length > self.layout.longest:
            return
        before = figures(self.layout)
        hit = self.layout.admit(of, length)
        if hit is None:
            assert figures(self.layout) == before
            assert self.live, "a sequence that fits alone finds no room in an empty memory"
            return
        assert 0 <= hit <= length
        self.live.append((of, length))
        if self.memory:
            self.memory.admitted(of, length, hit)

    def grow(self, at: int) -> None:
        of, length = self.live[at]
        if length in (of.length, self.layout.longest):
            return
        before = figures(self.layout)
        if self.layout.grow(of):
            self.live[at] = (of, length + 1)
            if self.memory:
                self.memory.grown(of, length + 1)
        else:
            assert figures(self.layout) == before

    def check(self) -> None:
        audit(self.layout, self.asked)
        assert dict(lengths_of(self.layout)) == {of.index: length for of, length in self.live}
        for of, length in self.live:
            if self.memory:
                self.memory.check(of, length)


def figures(layout: Layout) -> object:
    """Returns everything that a refusal must leave unchanged."""
    return (layout.used, layout.reserved, layout.saved, layout.moved, dict(lengths_of(layout)),
            {index: list(runs) for index, runs in extents_of(layout).items()})  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@trials(max_examples=50)
@given(asked=asked_for, actions=actions)
def test_counters_equal_those_of_the_extents(name: str, asked: Settings, actions: list[tuple[str, int, list[int]]]):
    trial = Trial(LAYOUTS[name](asked), asked)
    trial.check()
    for action in actions:
        trial.do(*action)
        trial.check()
    for of, _ in trial.live:
        trial.layout.release(of)
    trial.live.clear()
    trial.check()
    assert (trial.layout.used, trial.layout.reserved, trial.layout.saved) == (0, 0, 0)


def test_the_contiguous_layout_equals_an_example_by_hand():
    layout = LAYOUTS["contiguous"](settings(memory_tokens=10, reserve=4))
    a, b, c = (sequence(i, [0] * 4) for i in range(3))
    assert layout.overhead == 2
    assert [layout.admit(of, length) for of, length in ((a, 3), (b, 1), (c, 1))] == [0, 0, None]
    assert extents_of(layout) == {0: [(0, 4)], 1: [(4, 8)]}
    assert (layout.reserved, layout.used, layout.free) == (8, 4, 0)
    layout.release(a)
    assert layout.admit(c, 2) == 0
    assert extents_of(layout) == {1: [(4, 8)], 2: [(0, 4)]}
    assert layout.longest == 4


def test_the_growing_layout_equals_an_example_by_hand():
    layout = LAYOUTS["growing"](settings(memory_tokens=10))
    a, b, c = (sequence(i, [0] * 8) for i in range(3))
    assert (layout.admit(a, 3), layout.admit(b, 2)) == (0, 0)
    # The slots behind it are taken and no hole has 6 slots, so it moves to the 4 that it needs.
    assert layout.grow(a)
    assert extents_of(layout) == {0: [(5, 9)], 1: [(3, 5)]}
    assert (layout.moves, layout.moved, layout.free, layout.largest_hole()) == (1, 3, 4, 3)
    assert layout.admit(c, 4) is None
    assert layout.refused_by_fragmentation == 1
    # It grows in place, as far as the hole behind it reaches.
    assert layout.grow(a)
    assert extents_of(layout)[0] == [(5, 10)]
    layout.release(b)
    assert (layout.largest_hole(), layout.admit(c, 5)) == (5, 0)
    # The memory is full and not fragmented.
    assert not layout.grow(a)
    assert (layout.refused_by_fragmentation, layout.used, layout.reserved) == (1, 10, 10)


def test_the_paged_layout_equals_an_example_by_hand():
    layout = LAYOUTS["paged"](settings(memory_tokens=22))
    a, b = (sequence(i, [0] * 12) for i in range(2))
    # Overhead is the padding page and two slots behind the last page.
    assert layout.overhead == 6
    assert (layout.admit(a, 5), layout.admit(b, 4)) == (0, 0)
    assert extents_of(layout) == {0: [(4, 8), (8, 12)], 1: [(12, 16)]}
    assert (layout.reserved, layout.used, layout.free) == (12, 9, 4)
    assert layout.grow(b)
    assert extents_of(layout)[1] == [(12, 16), (16, 20)]
    assert [layout.grow(a) for _ in range(4)] == [True, True, True, False]
    assert (layout.reserved, layout.used, layout.free) == (16, 13, 0)


def test_the_shared_layout_equals_an_example_by_hand():
    layout = LAYOUTS["shared"](settings(memory_tokens=40))
    prompt = [1, 2, 3, 4, 5, 6]
    a, b = (sequence(i, [*prompt, 7 + i, 9], prompt=6) for i in range(2))
    c = sequence(2, [1, 2, 3, 4, 0, 0, 0, 0], prompt=6)
    assert (layout.admit(a, 6), layout.admit(b, 6)) == (0, 4)
    assert extents_of(layout) == {0: [(4, 8), (8, 12)], 1: [(4, 8), (12, 16)]}
    assert (layout.reserved, layout.used, layout.saved) == (12, 8, 4)
    assert (layout.grow(a), layout.grow(b)) == (True, True)
    assert (layout.moves, layout.used, layout.saved) == (0, 10, 4)
    # A third sequence finds the first page, while it is held and afterwards.
    assert layout.admit(c, 6) == 4
    assert (layout.reserved, layout.saved) == (16, 8)
    for of in (a, b, c):
        layout.release(of)
    assert (layout.reserved, layout.used, layout.saved) == (0, 0, 0)
    assert layout.admit(c, 6) == 4


def test_a_readmitted_sequence_finds_its_own_pages():
    layout = LAYOUTS["shared"](settings(memory_tokens=40))
    a = sequence(0, list(range(12)), prompt=2)
    assert layout.admit(a, 2) == 0
    assert all(layout.grow(a) for _ in range(8))
    layout.release(a)
    assert layout.admit(a, 10) == 8


def test_the_last_token_is_computed_even_if_all_pages_are_cached():
    layout = LAYOUTS["shared"](settings(memory_tokens=40))
    a, b = (sequence(i, list(range(12)), prompt=8) for i in range(2))
    assert (layout.admit(a, 8), layout.admit(b, 8)) == (0, 4)
    assert (layout.reserved, layout.saved) == (12, 4)
