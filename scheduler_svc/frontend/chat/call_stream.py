"""Owns a call whose arguments are shown while they are written: of families that write them as one JSON object. Pure.

A call begins to be shown with the first brace of its arguments, when its name is known. From then on it is a call,
whatever follows: what does not belong to its arguments is content.
"""

import re
from typing import Any, NamedTuple

from scheduler_svc.frontend.chat.json_stream import ObjectReader

# What may come before the arguments if the name is inside; other orders of the keys are read at the end of the call.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,128})"\s*,\s*"arguments"\s*:\s*(?=\{)')
MAX_HEAD_CHARS = 1024


class Shown(NamedTuple):
    """What a piece of text adds: the name with the first piece, then arguments."""

    name: str
    arguments: str


class CallStream:
    """One region with one call. `mark` is the text that opened it."""

    def __init__(self, field: Any, mark: str) -> None:
        self._reader = ObjectReader()
        self._name = ""
        # The text before the arguments; what follows them, from the end of the object or an error on.
        self._head = self._rest = ""
        self.has_begun = False
        self._is_hopeless = False
        if not _has_name_inside(field):
            # The pattern may look ahead to the first brace.
            match = field.open_re.match(mark + "{")
            self._name = match["name"].strip() if match is not None and match["name"] else ""
            self._is_hopeless = not self._name

    def feed(self, text: str) -> Shown | None:
        """What `text` shows of the call."""
        if self._is_hopeless:
            return None
        if self.has_begun:
            return Shown("", self._read(text)) if text else None
        self._head += text
        if self._name:
            begins = self._head.lstrip()
            self._is_hopeless = bool(begins) and not begins.startswith("{")
            arguments = begins
        else:
            match = _HEAD.match(self._head)
            self._is_hopeless = match is None and len(self._head) > MAX_HEAD_CHARS
            arguments = self._head[match.end() :] if match is not None else ""
            self._name = match[1] if match is not None else ""
        if self._is_hopeless or not arguments:
            return None
        self.has_begun = True
        return Shown(self._name, self._read(arguments))

    @property
    def held(self) -> str:
        """A number or a word at the end of the arguments that may go on."""
        return self._reader.held

    def rest(self) -> str:
        """At the end of the region: its text that is not part of the call, unless it only ends the call."""
        rest = self._reader.held + self._rest
        return "" if self._reader.is_complete and re.fullmatch(r"\s*\}?\s*", rest) else rest

    def _read(self, text: str) -> str:
        if self._reader.is_complete or self._reader.is_broken:
            self._rest += text
            return ""
        certain, num_read = self._reader.feed(text)
        self._rest += text[num_read:]
        return certain


def can_show(field: Any) -> bool:
    """Whether calls of this field are written as JSON that is shown as it comes."""
    if field.content != "json" or field.content_args or field.transform_each or not isinstance(field.transform, dict):
        return False
    return _arguments(field) == "{content}" or _has_name_inside(field)


def _has_name_inside(field: Any) -> bool:
    return _arguments(field) == "{content.arguments}"


def _arguments(field: Any) -> str:
    function: Any = field.transform.get("function", {})
    return str(function.get("arguments", ""))
