"""`Holes` compared with a plain list of slots."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.simulator.memory.layouts.holes import Holes

TOTAL = 16


def runs_of(free: list[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot, is_free in enumerate(free):
        if is_free and runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        elif is_free:
            runs.append((slot, slot + 1))
    return runs


@given(st.lists(st.tuples(st.sampled_from(["first", "behind", "give"]), st.integers(0, TOTAL), st.integers(1, 6))))
def test_holes_equal_a_plain_list_of_slots(actions: list[tuple[str, int, int]]):
    holes, free = Holes(TOTAL), [True] * TOTAL
    taken: list[tuple[int, int]] = []
    for action, at, count in actions:
        if action == "first":
            expected = next((start for start, end in runs_of(free) if end - start >= count), None)
            assert holes.take_first(count) == expected
            begin, end = (0, 0) if expected is None else (expected, expected + count)
        elif action == "behind":
            # Only a run that begins exactly here.
            starts = dict(runs_of(free))
            begin, end = at, min(at + count, starts.get(at, at))
            assert holes.take_behind(at, count) == end - begin
        elif taken:
            begin, end = taken.pop(at % len(taken))
            holes.give(begin, end)
            free[begin:end] = [True] * (end - begin)
            begin = end
        else:
            continue
        if begin < end:
            free[begin:end] = [False] * (end - begin)
            taken.append((begin, end))
        assert holes.runs() == runs_of(free)
        assert holes.largest() == max((end - begin for begin, end in runs_of(free)), default=0)
