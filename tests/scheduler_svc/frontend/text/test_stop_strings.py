"""Stop strings, compared with an oracle that searches the whole text."""

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_svc.frontend.text.output import StopFinder


def search(parts: list[str], stops: list[str], *, include_stop: bool = False, num_unarmed: int = 0) -> tuple[str, str]:
    """The visible text and the stop found."""
    finder, shown = StopFinder(stops, include_stop=include_stop), ""
    for idx, part in enumerate(parts):
        more, found = finder.push(part, armed=idx >= num_unarmed)
        shown += more
        if found:
            return shown, found
    return shown + finder.finish(), ""


def first_stop(text: str, stops: list[str], start: int = 0) -> tuple[int, str]:
    """The stop that ends first behind `start`, and its end; of stops that end together, the longest one."""
    for end in range(start + 1, len(text) + 1):
        if found := max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=""):
            return end, found
    return len(text), ""


def test_the_stop_string_that_ends_first_wins_over_one_that_begins_first():
    assert search(["xabcdx"], ["abcd", "bc"]) == ("xa", "bc")


def test_text_of_a_stop_string_that_ends_before_min_new_tokens_does_not_wait():
    finder = StopFinder(["stop"], include_stop=False)
    assert finder.push("stop", armed=False) == ("stop", "")


def test_a_forked_finder_searches_only_its_own_text():
    finder = StopFinder(["stop"], include_stop=False)
    assert finder.push("a sto", armed=True) == ("a ", "")
    other = finder.fork()
    assert other.push("p", armed=True) == ("p", "")
    assert other.push("stop", armed=True) == ("", "stop")
    assert finder.push("p", armed=True) == ("", "stop")


letters = st.text(alphabet="ab", max_size=4)


@given(
    st.lists(letters, max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 3),
)
# After `aaa`, `b` ends a string: it is found through two shorter ends, `aa` and `a`.
@example(["aaab"], ["aaabb", "ab"], False, 0)
def test_the_finder_and_the_oracle_agree(parts: list[str], stops: list[str], include_stop: bool, num_unarmed: int):
    """A stop that ends inside the unarmed parts is none."""
    text = "".join(parts)
    end, found = first_stop(text, stops, len("".join(parts[:num_unarmed])))
    shown = text[: end if include_stop else end - len(found)]
    assert search(parts, stops, include_stop=include_stop, num_unarmed=num_unarmed) == (shown, found)


@given(st.lists(letters, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_possible_beginnings_of_a_stop_string_wait(parts: list[str], stops: list[str]):
    finder, shown = StopFinder(stops, include_stop=False), ""
    for idx in range(len(parts)):
        more, found = finder.push(parts[idx], armed=True)
        if found:
            return
        shown += more
        text = "".join(parts[: idx + 1])
        longest = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert shown == text[: len(text) - longest]
