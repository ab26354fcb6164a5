"""What a terminal shows after some output: the rows of a screen and of what scrolled away above it.

Knows the few sequences that `tandem chat` uses for answers: colours, cursor up, clear to the end. Others are an error.
"""

import re
import unicodedata

_SEQUENCE = re.compile(r"\x1b\[(?P<number>\d*)(?:;[\d;]*)?(?P<kind>[A-Za-z])")


def rows_of(output: str, *, width: int, height: int) -> list[str]:
    """Returns all rows, without blanks at their ends, down to the cursor's row."""
    rows: list[list[str]] = [[]]
    row = column = place = 0
    while place < len(output):
        char = output[place]
        if char == "\x1b":
            found = _SEQUENCE.match(output, place)
            assert found is not None, f"unknown sequence: {output[place : place + 20]!r}"
            place = found.end()
            number = int(found["number"] or 0)
            match found["kind"]:
                case "m":
                    pass
                case "A":
                    # The cursor stops at the top of the screen; what has scrolled away cannot be reached.
                    row = max(row - (number or 1), len(rows) - height, 0)
                case "J":
                    assert number == 0
                    rows[row] = rows[row][:column]
                    del rows[row + 1 :]
                case kind:
                    raise AssertionError(f"unknown sequence of kind {kind}")
            continue
        place += 1
        if char == "\r":
            column = 0
        elif char == "\n":
            # The terminal's line discipline adds the carriage return.
            row, column = row + 1, 0
        else:
            assert char.isprintable(), f"a control character reached the terminal: {char!r}"
            cells = 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if column + cells > width:
                row, column = row + 1, 0
            while len(rows) <= row:
                rows.append([])
            rows[row] += [" "] * (column - len(rows[row]))
            rows[row][column : column + cells] = [char, *[""] * (cells - 1)]
            column += cells
        while len(rows) <= row:
            rows.append([])
    return ["".join(each).rstrip() for each in rows[: row + 1]]
