"""Reads a command's standard input.

Owns its decoding. Knows nothing of the text's use.
"""

import io
import sys


def read_text() -> str:
    """All of standard input, line breaks as \\n. Raises ValueError if it is not UTF-8, in every locale."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 (byte {error.start})") from None
    return io.StringIO(text, newline=None).read()
