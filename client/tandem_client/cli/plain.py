"""Text that others wrote, without the characters that would control a terminal."""

import re

# C0 without tab and line feed, DEL, C1, the line and paragraph separators, and the marks that change the direction of
# text, by which a line could show something else than it says.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Returns the text with each control character as a visible one: ␛ for an escape; a carriage return is dropped."""
    return _CONTROL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x0D:
        return ""
    if code < 0x20:
        # The symbols for control characters.
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
