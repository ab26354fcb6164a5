"""The last lines of the screen, which are drawn again and again while an answer grows.

Owns the escape sequences that remove what was drawn, and how things become lines. Knows nothing of what is drawn.
"""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.segment import Segment, SegmentLines

# The coloured pieces of one line of the screen.
Line = list[Segment]


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


class Region:
    """A part of the screen below everything that was printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # The widths in cells of the lines that are drawn.
        self._widths: list[int] = []

    def draw(self, lines: Sequence[Line], above: Sequence[Line] = ()) -> None:
        """Draws lines in place of what was drawn, and before them prints `above`, which stays.

        Of more lines than the screen has, the last ones are drawn.
        """
        shown = list(lines)[-max(1, self._console.height - 2) :]
        with self._console.capture() as captured:
            self._console.print(SegmentLines([*above, *shown], new_lines=True), end="")
        # One write, so that a terminal does not show the state between.
        self._console.file.write(self._removal() + captured.get())
        self._console.file.flush()
        self._widths = [Segment.get_line_length(line) for line in shown]

    def _removal(self) -> str:
        """Moves the cursor to where the region begins, and clears the screen from there.

        If the window has become narrower, lines that are longer now take several rows.
        """
        width = max(1, self._console.width)
        rows = sum(max(1, -(-each // width)) for each in self._widths)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""


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
