"""Owns the search for one request's stop strings in text that arrives in pieces. Knows nothing of tokens.

The algorithm is the Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975). Its node after a text
is the longest suffix that begins one of the strings, so the node determines both the match and how much text must be
held back. The string that ends first wins; of strings that end together, the longest one wins.
"""

import copy
from collections import deque
from collections.abc import Sequence


class StopFinder:
    """Finds the first of `strings` in the text pushed so far. There is at least one string, and no string is empty."""

    __slots__ = ("_fail", "_first", "_held", "_hold", "_include_stop", "_match", "_next", "_node")

    def __init__(self, strings: Sequence[str], *, include_stop: bool) -> None:
        self._include_stop = include_stop
        self._next: list[dict[str, int]] = [{}]
        # For each node: the string that ends there, or "".
        self._match: list[str] = [""]
        depth = self._add_strings(strings)
        self._fail = [0] * len(depth)
        # For each node: the number of characters at the end of the text that may still grow into a string.
        self._hold = [0] * len(depth)
        self._link(depth)
        self._first = frozenset(string[0] for string in strings)
        self._node = 0
        self._held = ""

    def fork(self) -> "StopFinder":
        """A finder for the same strings in another text. The two finders share the automaton."""
        other = copy.copy(self)
        other._node, other._held = 0, ""
        return other

    def push(self, text: str, *, armed: bool) -> tuple[str, str]:
        """Returns (visible text, string found or "").

        Strings that end in `text` count only if `armed`. After a match no more text becomes visible.
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
        num_visible = len(known) - self._hold[node]
        self._node, self._held = node, known[num_visible:]
        return known[:num_visible], ""

    def finish(self) -> str:
        """The held text, at the end of the output."""
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
