"""What the terminal shows: answers that come in any pieces, hostile texts, narrow and changing screens."""

import io
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from tandem_client.cli.chat.screen import Kind, PlainScreen, RichScreen, cut, new_screen
from tests.rigs.small_screen import rows_of

DOCUMENT = """\
# Title

A paragraph with **bold** and `code`
over two lines.

1. one
2. two

   still two

- a
  - b

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

Heading
-------

日本語 and Zoë.
"""
HOSTILE = "\x1b]0;own\x07 \x1b[2J\x9b31m &#27;[31m &#x9b;A [text](http://evil.example) \r\u202etxt.exe\n"


def console(width: int = 60, height: int = 24) -> Console:
    made = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="truecolor")
    made.file.write("")
    return made


def output_of(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


def rows(made: Console) -> list[str]:
    found = rows_of(output_of(made), width=made.width, height=made.height)
    return [row for row in found if row]


def shown(text: str, cuts: list[int], *, height: int = 24) -> list[str]:
    made = console(height=height)
    screen = RichScreen(made)
    places = sorted({0, *(place for place in cuts if place < len(text)), len(text)})
    for start, end in itertools.pairwise(places):
        screen.add(Kind.CONTENT, text[start:end])
        screen.refresh("waiting (2 s)" if start % 2 else "")
    screen.finish()
    return rows(made)


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(1, len(DOCUMENT)), max_size=40), height=st.sampled_from([4, 8, 24]))
def test_an_answer_in_any_pieces_ends_as_the_whole(cuts: list[int], height: int) -> None:
    made = console()
    made.print(Markdown(DOCUMENT, code_theme="ansi_dark", hyperlinks=False))
    assert shown(DOCUMENT, cuts, height=height) == rows(made)


@settings(max_examples=200)
@given(text=st.text(alphabet="ab \n#-*1.>`|", max_size=80))
def test_cutting_keeps_every_character(text: str) -> None:
    done, rest = cut(text)
    assert done + rest == text
    assert not done or done.endswith("\n")


def test_only_whole_blocks_are_cut() -> None:
    assert cut("a\nb") == ("", "a\nb")
    assert cut("a\n\nb") == ("", "a\n\nb")
    assert cut("a\n\nb\n") == ("a\n\n", "b\n")
    # A list may go on after a blank line.
    assert cut("1. a\n\n2") == ("", "1. a\n\n2")
    assert cut("1. a\n\n2. b\n") == ("", "1. a\n\n2. b\n")
    assert cut("```\na\n\nb\n") == ("", "```\na\n\nb\n")


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("screen", [RichScreen, PlainScreen])
def test_no_control_character_of_the_model_reaches_the_terminal(kind: Kind, screen: type) -> None:
    made = console()
    place = screen(made)
    for char in HOSTILE * 2:
        place.add(kind, char)
        place.refresh(HOSTILE)
    place.finish()
    place.note(HOSTILE)
    place.table([("name", HOSTILE)])
    # `rows_of` refuses every character and sequence that is not one of ours.
    text = "".join(rows(made))
    assert "own" in text and "http://evil.example" in text
    assert not set("\u202e\x9b\x07\x08") & set(output_of(made))
    assert not re.search(r"\x1b\]|\x1b\[2J", output_of(made))


def test_reasoning_stands_dimmed_above_the_answer() -> None:
    made = console()
    screen = RichScreen(made)
    for kind, text in ((Kind.REASONING, "Let me\nthi"), (Kind.REASONING, "nk."), (Kind.CONTENT, "It **is**.")):
        screen.add(kind, text)
        screen.refresh("")
    screen.finish()
    assert rows(made) == ["Let me", "think.", "It is."]
    assert "\x1b[2;3mLet me\x1b[0m" in output_of(made) and "\x1b[1mis\x1b[0m" in output_of(made)


def test_a_note_stays_above_the_answer_and_a_status_does_not_stay() -> None:
    made = console()
    screen = RichScreen(made)
    screen.add(Kind.CONTENT, "one")
    screen.refresh("worker lost (2 s)")
    assert rows(made) == ["one", "worker lost (2 s)"]
    screen.note("worker lost, resumed after 2.1 s")
    screen.add(Kind.CONTENT, " two")
    screen.refresh("")
    screen.finish()
    assert rows(made) == ["worker lost, resumed after 2.1 s", "one two"]


def test_lines_that_a_narrower_window_wraps_are_removed() -> None:
    made = console(width=60)
    screen = RichScreen(made)
    screen.add(Kind.CONTENT, "word " * 20)
    screen.refresh("")
    before = output_of(made)
    # The terminal breaks the two lines of up to 59 cells into rows of 20.
    made.width = 20
    screen.finish()
    removal = output_of(made)[len(before) :]
    assert removal.startswith("\r\x1b[5A\x1b[J")


def test_dumb_terminals_and_files_get_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    screen = new_screen(Console(file=file))
    screen.add(Kind.REASONING, "hm")
    screen.refresh("waiting (2 s)")
    screen.add(Kind.CONTENT, "# *a*\n")
    screen.add(Kind.CONTENT, "b")
    screen.note("worker lost, resumed after 2.0 s")
    screen.add(Kind.CONTENT, "c")
    screen.finish()
    screen.note("end")
    assert file.getvalue() == "hm\n\n# *a*\nb\n[worker lost, resumed after 2.0 s]\nc\n[end]\n"
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(new_screen(Console(file=io.StringIO(), force_terminal=True)), PlainScreen)
