"""Owns the difference between a control token and ordinary text that reads the same, while an answer is parsed. Pure.

In a marked text the first character of a control token is half of a surrogate pair, which no decoded text has. Marked
and plain text are equally long.
"""

import re
from collections.abc import Collection, Mapping

from scheduler_svc.frontend.text.detokenize import Decode

_FIRST, _NUM = 0xDC00, 0x100
_PLAIN = {_FIRST + code: code for code in range(_NUM)}


def marked(control: str) -> str:
    """The text of a control token, marked. One that does not begin with a letter of Latin-1 stays as it is."""
    return chr(_FIRST + ord(control[0])) + control[1:] if control and ord(control[0]) < _NUM else control


def plain(text: str) -> str:
    """The text as callers see it."""
    return text if text.isascii() else text.translate(_PLAIN)


def mark_all(text: str, controls: Collection[str]) -> str:
    """`text`, a text or a regular expression, with every text of a control token marked."""
    texts = {form: marked(each)[0] + form[len(form) - len(rest) :] for each in controls for form, rest in _forms(each)}
    if not texts:
        return text
    longest_first = sorted(texts, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: texts[found.group()], text)


def _forms(control: str) -> list[tuple[str, str]]:
    """How a text may write a control token, each with what follows its first character."""
    return [(control, control[1:]), (re.escape(control), re.escape(control[1:]))]


def marking(decode: Decode, controls: Mapping[int, str]) -> Decode:
    """A decode function that marks these control tokens."""

    def decode_marked(tokens: list[int]) -> str:
        text = decode(tokens)
        if controls.keys().isdisjoint(tokens):
            return text
        for idx, token in enumerate(tokens):
            if (control := controls.get(token)) is not None:
                # What a decoder makes of white space at the cut may differ, but not by more.
                at = text.find(control, max(0, len(decode(tokens[:idx])) - 1))
                if at >= 0:
                    text = text[:at] + marked(control) + text[at + len(control) :]
        return text

    return decode_marked
