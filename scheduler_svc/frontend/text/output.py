"""Owns the conversion of one sample's tokens to its visible output: offsets, text, and the end at a stop string.

Knows nothing of gRPC, sockets or other streams. The earliest token position wins: a stop string that completes at
position p ends the output after p tokens, even if the core reported an end at a later position. Stop strings are
searched in what the caller reads as the text: of a parsed answer that is its content, without reasoning and calls.

The search is the Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975). Its node after a text is
the longest suffix that begins one of the strings, so the node determines both the match and how much text must be held
back. The string that ends first wins; of strings that end together, the longest one wins.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.frontend.text.detokenize import Detokenizer


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
        pending = self._held + text
        for num_read, char in enumerate(text, start=len(self._held) + 1):
            while node and char not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(char, 0)
            stop = self._match[node]
            if stop and armed:
                self._node, self._held = 0, ""
                return pending[: num_read if self._include_stop else num_read - len(stop)], stop
        num_visible = len(pending) - self._hold[node]
        self._node, self._held = node, pending[num_visible:]
        return pending[:num_visible], ""

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


class CallPiece(NamedTuple):
    """A piece of a call of a tool. `idx` is the call's number in the output; id and name are in the first piece."""

    idx: int
    id: str
    name: str
    arguments: str


class OutputPiece(NamedTuple):
    """The next part of an output. `stop_string` is the string that ended the output, or ""."""

    token_ids: list[int]
    text: str
    stop_string: str
    # The other parts of a parsed answer; `text` is its content.
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(slots=True)
class Parsed:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    # In a tenth of the time of list[CallPiece], for every message. `list` alone has no type.
    calls: list[CallPiece] = field(default_factory=lambda: [])  # noqa: PIE807

    def add(self, later: "Parsed") -> None:
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls += later.calls


@dataclass(slots=True, kw_only=True)
class SampleOutput:
    """The output of one sample. Without a detokenizer it has no text; stop strings require one."""

    detokenizer: Detokenizer | None
    stop_finder: StopFinder | None
    stop_token_ids: frozenset[int]
    min_new_tokens: int
    include_stop: bool
    # Output tokens returned so far.
    num_tokens: int = field(default=0, init=False)
    # Counted in a parsed answer.
    reasoning_tokens: int = field(default=0, init=False)
    # Where tokens are sent with their pieces of text: whether that of the last of these tokens may still grow.
    may_grow: Callable[[Sequence[int]], bool] | None = field(default=None, init=False)
    # The last token, if it may be the stop token, and one with a piece that may grow. The next one decides, or the End.
    _withheld: list[int] = field(default_factory=list[int], init=False)

    def push(self, tokens: Sequence[int]) -> OutputPiece:
        """The piece that `tokens` add while the output continues."""
        pending = [*self._withheld, *tokens]
        num_shown = len(pending) - (bool(pending) and pending[-1] in self.stop_token_ids)
        num_shown -= self.may_grow is not None and self.may_grow(pending[:num_shown])
        self._withheld = pending[num_shown:]
        del pending[num_shown:]
        return self._read(pending, len(pending))

    def finish(self, tokens: Sequence[int], *, stop_token_id: int | None, is_cut: bool = False) -> OutputPiece:
        """The piece that the last `tokens` add, with all held text. `stop_token_id` is the token that ended the output.

        `is_cut`: something else than the model ended it, which only a parsed answer shows.
        The piece contains the stop token's id always and its text only with include_stop.
        """
        pending = [*self._withheld, *tokens]
        self._withheld = []
        is_hidden = bool(pending) and pending[-1] == stop_token_id and not self.include_stop
        return self._read(pending, len(pending) - is_hidden, is_end=True, is_cut=is_cut)

    def _read(self, tokens: list[int], num_visible: int, *, is_end: bool = False, is_cut: bool = False) -> OutputPiece:
        """The piece that `tokens` add, of which the first `num_visible` have text."""
        shown, num_read, stop = Parsed(), 0, ""
        if self.detokenizer is not None:
            for group in self._groups(tokens[:num_visible]):
                num_read += len(group)
                stop = self._show(shown, self._parse(self.detokenizer.push(group), len(group)), num_read)
                if stop:
                    break
            else:
                if is_end:
                    text, num_hidden = self.detokenizer.finish(), len(tokens) - num_visible
                    rest = self._parse(text, num_hidden, is_end=True, is_cut=is_cut)
                    stop = self._show(shown, rest, num_visible)
        num_kept = num_read if stop else len(tokens)
        if is_end and not stop and self.stop_finder is not None:
            shown.content += self.stop_finder.finish()
        self.num_tokens += num_kept
        return OutputPiece(tokens[:num_kept], shown.content, stop, shown.reasoning, shown.calls)

    def _groups(self, tokens: list[int]) -> Iterable[Sequence[int]]:
        if self.stop_finder is None:
            return [tokens] if tokens else []
        return zip(tokens)

    def _parse(self, text: str, num_tokens: int, *, is_end: bool = False, is_cut: bool = False) -> Parsed:
        """What the text of `num_tokens` tokens adds to the answer, with the rest of it if it `is_end`."""
        return Parsed(text)

    def _show(self, shown: Parsed, parsed: Parsed, num_read: int) -> str:
        """Adds what may be seen of `parsed`. Returns the stop string that ends the output, or ""."""
        stop = ""
        if self.stop_finder is not None and parsed.content:
            armed = self.num_tokens + num_read >= self.min_new_tokens
            parsed.content, stop = self.stop_finder.push(parsed.content, armed=armed)
        shown.add(parsed)
        return stop
