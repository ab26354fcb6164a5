"""What the conversation shows: Markdown that grows, or plain text on terminals that cannot move the cursor.

Owns the looks, and the last lines of the screen, which are drawn again and again while an answer grows. Everything that
a model or a service wrote passes `plain`, so that no escape sequence of theirs reaches the terminal. Knows nothing of
calls.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from markdown_it import MarkdownIt
from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from tandem_client.cli.plain import plain

_PARSER = MarkdownIt().enable("strikethrough").enable("table")

# The coloured pieces of one line of the screen.
Line = list[Segment]

# A theme of the terminal's own colours, which fit every background.
_CODE_THEME = "ansi_dark"


def cut(text: str) -> tuple[str, str]:
    """Returns the finished blocks of growing Markdown, and the rest, which may still change its meaning.

    Only whole lines are looked at, and the last block of them may still grow: a list gets items, a paragraph becomes a
    heading by its underline.
    """
    end = text.rfind("\n") + 1
    starts = [token.map[0] for token in _PARSER.parse(text[:end]) if token.level == 0 and token.map is not None]
    if not starts or starts[-1] == 0:
        return "", text
    place = 0
    for _ in range(starts[-1]):
        place = text.index("\n", place) + 1
    return text[:place], text[place:]


def lines_of(console: Console, renderable: RenderableType) -> list[Line]:
    """Returns the lines of something at the screen's width, without blank lines around it and blanks at their ends.

    Blanks at the ends would be copied with the text, and would take another row each once the window is narrower.
    """
    lines = [_without_end_blanks(line) for line in console.render_lines(renderable, pad=False)]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def _without_end_blanks(line: Line) -> Line:
    kept = list(line)
    while kept:
        text, style, control = kept[-1]
        stripped = text.rstrip(" ")
        if control or (style is not None and style.bgcolor is not None) or stripped == text:
            break
        kept.pop()
        if stripped:
            kept.append(Segment(stripped, style))
    return kept


class Kind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


class RichScreen:
    """Finished blocks are printed once; the last one is drawn again as it grows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._kind = Kind.CONTENT
        # What has come of this kind and is not printed for good, and finished lines that are not printed yet.
        self._rest = ""
        self._above: list[Line] = []
        # What is drawn again and again, below all that is printed for good: the widths of its lines in cells; and the
        # rest, the status and the width of the screen.
        self._widths: list[int] = []
        self._drawn = ("", "", 0)

    def add(self, kind: Kind, text: str) -> None:
        """A part of the answer has come; it is drawn with the next `refresh`."""
        if kind != self._kind:
            self._settle()
            self._kind = kind
        self._rest += plain(text)

    def refresh(self, status: str) -> None:
        """Draws what has come, and the status below it; empty: none."""
        if self._drawn == (self._rest, status, self._console.width) and not self._above:
            return
        done, self._rest = cut(self._rest) if self._kind == Kind.CONTENT else _whole_lines(self._rest)
        self._above += self._block(done)
        lines = self._look(self._rest)
        if status:
            lines += lines_of(self._console, Text(plain(status), style="dim", no_wrap=True, overflow="ellipsis"))
        self._print(lines)
        self._drawn = (self._rest, status, self._console.width)

    def finish(self) -> None:
        """The answer has ended; draws what is left of it and removes the status."""
        self._settle()
        self._kind = Kind.CONTENT
        self._print(())

    def note(self, text: str) -> None:
        """Prints a line that is not the model's."""
        self._above += lines_of(self._console, Text(plain(text), style="dim"))
        self._print(())

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for name, what in rows:
            table.add_row(Text(name, style="bold"), Text(plain(what)))
        self._above += lines_of(self._console, table)
        self._print(())

    def _print(self, lines: Sequence[Line]) -> None:
        """Draws lines in place of what was drawn, and before them prints the finished ones, which stay.

        Of more lines than the screen has, the last ones are drawn.
        """
        shown = list(lines)[-max(1, self._console.height - 2) :]
        with self._console.capture() as captured:
            self._console.print(SegmentLines([*self._above, *shown], new_lines=True), end="")
        # One write, so that a terminal does not show the state between.
        self._console.file.write(self._removal() + captured.get())
        self._console.file.flush()
        self._widths = [Segment.get_line_length(line) for line in shown]
        self._above, self._drawn = [], ("", "", 0)

    def _removal(self) -> str:
        """Moves the cursor to where the first drawn line begins, and clears the screen from there.

        If the window has become narrower, lines that are longer now take several rows.
        """
        width = max(1, self._console.width)
        rows = sum(max(1, -(-cells // width)) for cells in self._widths)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""

    def _settle(self) -> None:
        """Prints what is left of this kind for good."""
        if self._rest.strip():
            self._above += self._block(self._rest)
            if self._kind == Kind.REASONING:
                self._above.append([])
        self._rest = ""

    def _block(self, text: str) -> list[Line]:
        """The lines of finished text; a blank line follows each block of content."""
        lines = self._look(text)
        return [*lines, []] if lines and self._kind == Kind.CONTENT else lines

    def _look(self, text: str) -> list[Line]:
        if self._kind == Kind.REASONING:
            return lines_of(self._console, Text(text.rstrip("\n"), style="dim italic")) if text else []
        # Without hyperlinks, because their text could hide where they lead.
        return lines_of(self._console, Markdown(text, code_theme=_CODE_THEME, hyperlinks=False))


class PlainScreen:
    """The same for other terminals and files: text as it comes. Nothing is drawn twice."""

    def __init__(self, console: Console) -> None:
        self._file = console.file
        self._kind: Kind | None = None
        self._line_is_open = False

    def add(self, kind: Kind, text: str) -> None:
        if self._kind not in (None, kind):
            self._write("\n\n")
        self._kind = kind
        self._write(plain(text))

    def refresh(self, status: str) -> None:
        """This screen has no place for the status."""

    def finish(self) -> None:
        self._end_line()
        self._kind = None

    def note(self, text: str) -> None:
        self._end_line()
        self._write(f"[{plain(text)}]\n")

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        for name, what in rows:
            self._write(f"{name}: {plain(what)}\n")

    def _end_line(self) -> None:
        if self._line_is_open:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._file.write(text)
            self._file.flush()
            self._line_is_open = not text.endswith("\n")


def _whole_lines(text: str) -> tuple[str, str]:
    end = text.rfind("\n") + 1
    return text[:end], text[end:]


Screen = RichScreen | PlainScreen


def new_screen(console: Console) -> Screen:
    """The screen that the terminal is able to show."""
    return RichScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen(console)
