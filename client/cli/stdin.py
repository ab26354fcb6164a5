"""What a command reads from standard input.

Owns its decoding. Knows nothing of what the text is for.
"""

import io
import sys


def read_text() -> str:
    """All of it, line breaks as \\n. Raises ValueError where it is not UTF-8, whatever the locale says."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 (byte {error.start})") from None
    return io.StringIO(text, newline=None).read()
