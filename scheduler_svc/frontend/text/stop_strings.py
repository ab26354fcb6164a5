"""Owns the search for one request's stop strings in text that comes in pieces. Knows nothing of tokens.

Theory: the Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975). Its node after a text is the
longest suffix that begins one of the strings, so the node tells both what matched and how much text must be held back.
The string that ends first wins; of those that end together, the longest.
"""

import copy
from collections import deque
from collections.abc import Sequence


class StopFinder:
    """Looks for `strings` (not empty, none of them empty) in the text pushed so far."""

    __slots__ = ("_fail", "_first", "_held", "_hold", "_include_stop", "_match", "_next", "_node")

    def __init__(self, strings: Sequence[str], *, include_stop: bool) -> None:
        self._include_stop = include_stop
        self._next: list[dict[str, int]] = [{}]
        # Per node: the string that ends here, or "".
        self._match: list[str] = [""]
        depth = self._add_strings(strings)
        self._fail = [0] * len(depth)
        # Per node: characters at the end of the text that may yet grow into a string.
        self._hold = [0] * len(depth)
        self._link(depth)
        self._first = frozenset(string[0] for string in strings)
        self._node = 0
        self._held = ""

    def fork(self) -> "StopFinder":
        """Another one for the same strings, at the beginning of another text. The automaton is shared."""
        other = copy.copy(self)
        other._node, other._held = 0, ""
        return other

    def push(self, text: str, *, armed: bool) -> tuple[str, str]:
        """Returns (text that may be shown, the string found or "").

        Unless `armed`, strings that end in `text` do not count. After a find the text is all there is to show.
        """
        node = self._node
        if not node and self._first.isdisjoint(text):
            return text, ""
        known = self._held + text
        for num_read, char in enumerate(text, start=len(self._held) + 1):
            while node and char not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(char, 0)
            found = self._match[node]
            if found and armed:
                self._node, self._held = 0, ""
                return known[: num_read if self._include_stop else num_read - len(found)], found
        num_shown = len(known) - self._hold[node]
        self._node, self._held = node, known[num_shown:]
        return known[:num_shown], ""

    def finish(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _add_strings(self, strings: Sequence[str]) -> list[int]:
        depth = [0]
        for string in strings:
            node = 0
            for char in string:
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._match.append("")
                    depth.append(depth[node] + 1)
                node = self._next[node][char]
            self._match[node] = string
        return depth

    def _link(self, depth: list[int]) -> None:
        queue = deque(self._next[0].values())
        for node in queue:
            self._hold[node] = 1 if self._next[node] else 0
        while queue:
            parent = queue.popleft()
            for char, node in self._next[parent].items():
                fail = self._fail[parent]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                fail = self._next[fail].get(char, 0)
                self._fail[node] = fail
                self._match[node] = self._match[node] or self._match[fail]
                self._hold[node] = depth[node] if self._next[node] else self._hold[fail]
                queue.append(node)
