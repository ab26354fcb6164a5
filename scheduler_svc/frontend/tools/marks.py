"""Owns the texts in a grammar: which parts of them are strings, and which are tokens of their own. Pure."""

import json
import re
from collections.abc import Mapping

# Free text. It has no tokens that llguidance treats as marks.
TEXT = "TEXT: /(.|\\n)*/"
_JSON_WORD = re.compile(r'"[^"]*"|[,:] ?|[{}\[\]]|[^{}\[\]",:]+|"')


class Marks:
    """The tokens that llguidance treats as marks: special ones, and those that look like <this>."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: their ids by their texts."""
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def rule(self, text: str) -> str:
        """`text` as a part of a rule: strings and references to tokens; empty for the empty text."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else string(part) for part in self.parts(text))

    def parts(self, text: str) -> list[str | int]:
        """The strings and the ids of tokens of which `text` is made."""
        parts, at = list[str | int](), 0
        for mark in self._pattern.finditer(text):
            parts += [text[at : mark.start()], self._ids[mark.group()]]
            at = mark.end()
        return [part for part in [*parts, text[at:]] if part != ""]

    def are_in(self, text: str) -> bool:
        """Whether the text has a mark."""
        return self._pattern.search(text) is not None

    def until(self, name: str, text: str) -> str:
        """The line of the rule `name`, which matches everything up to and with the first `text`."""
        mark = self._pattern.search(text)
        if mark is None:
            return f"{name}[lazy]: TEXT {string(text)}"
        # Free text cannot contain the mark, so it ends before the first one.
        before, rest = text[: mark.start()], self.rule(text[mark.end() :])
        free = f"/(.|\\n)*{_in_regex(before)}/" if before else "TEXT"
        return f"{name}: {free} {self._reference(mark)} {rest}".rstrip()

    def _reference(self, mark: re.Match[str]) -> str:
        return f"<[{self._ids[mark.group()]}]>"


def string(text: str) -> str:
    """`text` as a string of a grammar; empty for the empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_words(text: str) -> str:
    """`text` as a part of a rule with one string for each word of JSON in it."""
    return " ".join(map(string, _JSON_WORD.findall(text)))


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n").replace("\\ ", " ")
