"""Keeps the names of each JSON object of an output apart.

llguidance forgets a name that a schema does not list, so it would let an object have it twice. Here a row remembers the
names of its open objects, and tokens that complete one again leave the mask, as do commas after the last name. Escapes
give each name one spelling (the front end's options), so bytes are compared.

The front end says where JSON stands: it writes `json_places` beside a grammar, a list of states, each a list of steps
[mark, next state, begun]. Outside of JSON, a row goes to the next state when its output ends with a mark of its state;
with `begun`, JSON begins there, of which the mark has this much. When its first brace is closed, the row is outside
again, in the next state. A mark is a list of texts and ids of control tokens.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

# What a control token begins with in the followed bytes. No text has the first of these, and none is a brace.
MARK = b"\xff<"
Mask = NDArray[np.uint32]
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPEN_OBJECT, _OPEN_LIST = b"{["
_CLOSE = b"}]"


def mark(token: int) -> bytes:
    """The followed bytes of a control token."""
    return MARK + b"%d>" % token


@dataclass(frozen=True, slots=True)
class Step:
    """What follows a mark."""

    mark: bytes
    state: int
    begun: bytes


class Places:
    """The places of JSON in the output under one grammar."""

    def __init__(self, states: list[list[Step]]) -> None:
        # The longest mark counts.
        self._states = [sorted(steps, key=lambda step: -len(step.mark)) for steps in states]
        self._marks = [tuple(step.mark for step in steps) for steps in self._states]
        self.longest = max((len(mark) for marks in self._marks for mark in marks), default=1)

    def after(self, state: int, text: bytes) -> Step | None:
        """The step of a state for an output that ends with `text`, if it ends with a mark."""
        if not text.endswith(self._marks[state]):
            return None
        return next(step for step in self._states[state] if text.endswith(step.mark))

    @classmethod
    def of(cls, source: bytes) -> Self | None:
        """What the front end says beside a grammar of JSON text; None if no object can have a name twice."""
        if not source.startswith(b'{"grammars"'):
            return None
        states = json.loads(source)["grammars"][0].get("json_places")
        if not states:
            return None
        return cls(
            [[Step(_followed(parts), next_, begun.encode()) for parts, next_, begun in steps] for steps in states]
        )


def _followed(parts: list[str | int]) -> bytes:
    return b"".join(mark(part) if isinstance(part, int) else part.encode() for part in parts)


class TokenTexts:
    """The bytes of all tokens, and the tokens that begin with some bytes."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        # Control tokens stand for no text of JSON.
        self.texts = [mark(id_) if tokenizer.is_special_token(id_) else tokenizer.decode_bytes([id_]) for id_ in ids]
        order = sorted(ids, key=self.texts.__getitem__)
        self._order, self._sorted = np.array(order, np.int64), [self.texts[id_] for id_ in order]
        # After all that a token may have behind other text.
        self._beyond = b"\xff" * max(map(len, self.texts), default=0)
        self.with_comma = np.array([id_ for id_ in ids if b"," in self.texts[id_]], np.int64)
        self.with_quoted_comma = np.array([id_ for id_ in ids if b"," in self.texts[id_].partition(b'"')[2]], np.int64)
        # Those that may hold a whole name.
        self.with_two_quotes = np.array([id_ for id_ in ids if self.texts[id_].count(b'"') > 1], np.int64)

    def beginning_with(self, text: bytes) -> NDArray[np.int64]:
        """The ids of the tokens that begin with a text, which is not empty."""
        return self._order[bisect_left(self._sorted, text) : bisect_left(self._sorted, text + self._beyond)]

    def equal_to(self, text: bytes) -> NDArray[np.int64]:
        """The ids of the tokens with this text, which is not empty."""
        return self._order[bisect_left(self._sorted, text) : bisect_left(self._sorted, text + b"\0")]


@dataclass(slots=True)
class _Object:
    """An open object."""

    names: set[bytes] = field(default_factory=set[bytes])
    # Names that others begin with.
    extended: set[bytes] = field(default_factory=set[bytes])
    # With how many names another one was known to remain.
    has_more: int = 0
    # The masks after the first bytes of a name.
    masks: dict[bytes, Mask] = field(default_factory=dict[bytes, Mask])


class NamesOfRow:
    """Follows the JSON of one row."""

    def __init__(self, texts: TokenTexts, places: Places) -> None:
        self._texts, self._places = texts, places
        # Outside of JSON: the state, and the last bytes, in which marks are searched.
        self._state, self._last = 0, b""
        # None stands for a list.
        self._open: list[_Object | None] = []
        self._is_name_next = self._is_in_string = self._is_escaped = False
        # What there is of the name that is being written.
        self._name: bytearray | None = None

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._follow(self._texts.texts[token])

    def _follow(self, text: bytes) -> bool:
        """Returns whether an object got a name twice."""
        if (self._open or self._is_in_string) and text.startswith(MARK):
            return False
        if self._is_in_string and self._name is None and not (self._is_escaped or b'"' in text or b"\\" in text):
            return False
        has_twice = False
        for byte in text:
            if self._open or self._is_in_string:
                has_twice |= self._in_json(byte)
            else:
                self._outside(byte)
        return has_twice

    def _outside(self, byte: int) -> None:
        self._last = (self._last + bytes((byte,)))[-self._places.longest :]
        if (place := self._places.after(self._state, self._last)) is None:
            return
        self._state = place.state
        for begun in place.begun:
            self._last = b""
            self._in_json(begun)

    def _in_json(self, byte: int) -> bool:
        if self._is_in_string:
            return self._in_string(byte)
        if byte == _QUOTE:
            self._is_in_string = True
            self._name = bytearray() if self._is_name_next else None
        elif byte in (_OPEN_OBJECT, _OPEN_LIST):
            self._is_name_next = byte == _OPEN_OBJECT
            self._open.append(_Object() if self._is_name_next else None)
        elif byte in _CLOSE and self._open:
            self._open.pop()
            self._is_name_next = False
        elif byte == _COMMA:
            self._is_name_next = bool(self._open) and self._open[-1] is not None
        return False

    def _in_string(self, byte: int) -> bool:
        has_twice = False
        if byte != _QUOTE or self._is_escaped:
            self._is_escaped = byte == _BACKSLASH and not self._is_escaped
            if self._name is not None:
                self._name.append(byte)
        else:
            self._is_in_string = False
            inner = self._open[-1] if self._open else None
            if self._name is not None and inner is not None:
                has_twice = bytes(self._name) in inner.names
                inner.names.add(bytes(self._name))
                # Other names may follow now.
                inner.masks.clear()
            self._name, self._is_name_next = None, False
        return has_twice

    def forbid(self, matcher: LLMatcher, mask: Mask) -> None:
        """Takes the tokens out of a mask that would give an object a name twice, or leave no other name."""
        if not self._open and not self._is_in_string:
            return
        whole_names = _allowed(mask, self._texts.with_two_quotes)
        forbidden = [np.array([id_ for id_ in whole_names if self._copy()._follow(self._texts.texts[id_])], np.int64)]
        inner = self._open[-1] if self._open else None
        if self._name is not None and inner is not None:
            begun = bytes(self._name)
            for name in [name for name in inner.names if name.startswith(begun)]:
                forbidden.append(self._texts.beginning_with(name[len(begun) :] + b'"'))
                forbidden += self._blind(inner, matcher, begun, name)
        forbidden.append(np.array(self._beyond_last(matcher, mask), np.int64))
        _clear(mask, forbidden)

    def _beyond_last(self, matcher: LLMatcher, mask: Mask) -> list[int]:
        """The tokens with a comma after which an object that has all its names would need another one."""
        if all(opened is None or opened.has_more == len(opened.names) for opened in self._open):
            return []
        tokens = list[int]()
        for token in _allowed(mask, self._texts.with_quoted_comma if self._is_in_string else self._texts.with_comma):
            other = self._copy()
            other._follow(self._texts.texts[token])
            depth, needs_name = len(other._open), other._is_name_next or other._name is not None
            if not needs_name or not 0 < depth <= len(self._open):
                continue
            outer, inner = self._open[depth - 1], other._open[-1]
            if outer is None or inner is None:
                continue
            if outer.has_more != len(inner.names):
                if self._is_more_after(token, other, inner, matcher):
                    outer.has_more = len(inner.names)
                else:
                    tokens.append(token)
        return tokens

    def _is_more_after(self, token: int, other: "NamesOfRow", obj: _Object, matcher: LLMatcher) -> bool:
        """Whether a name that the object has not may follow a token with a comma."""
        after, begun = matcher.deep_copy(), bytes(other._name or b"")
        after.consume_token(token)
        quotes = [self._bytes_of(text) for text in ((b' "', b'"') if other._name is None else ())]
        if quotes and not any(after.try_consume_tokens(ids) == len(ids) for ids in quotes):
            return True
        return other._branches(obj, after, begun, begun)

    def _copy(self) -> "NamesOfRow":
        other = copy(self)
        other._open = [None if obj is None else _Object(set(obj.names)) for obj in self._open]
        other._name = None if self._name is None else bytearray(self._name)
        return other

    def _blind(self, obj: _Object, matcher: LLMatcher, begun: bytes, name: bytes) -> Iterator[NDArray[np.int64]]:
        """The tokens after which only a name that the object has can follow, on the way to `name`."""
        if name in obj.extended:
            return
        if not all(len(self._texts.equal_to(name[idx : idx + 1])) for idx in range(len(begun), len(name))):
            # Without tokens of single bytes the way cannot be followed.
            obj.extended.add(name)
            return
        after = self._mask_at(obj, matcher, begun, name).copy()
        _clear(after, [self._texts.beginning_with(b'"')])
        if after.any():
            obj.extended.add(name)
            return
        ends = range(len(name) - 1, len(begun) - 1, -1)
        last = next((end for end in ends if self._branches(obj, matcher, begun, name[:end])), None)
        if last is not None:
            for end in range(last + 1, len(name) + 1):
                yield self._texts.equal_to(name[len(begun) : end])

    def _branches(self, obj: _Object, matcher: LLMatcher, begun: bytes, so_far: bytes) -> bool:
        """Whether a name that the object does not list may go on from `so_far`."""
        mask, names = self._mask_at(obj, matcher, begun, so_far).copy(), [n for n in obj.names if n.startswith(so_far)]
        other = mask.copy()
        _clear(other, [self._texts.beginning_with(first) for first in {(n + b'"')[len(so_far) :][:1] for n in names}])
        if other.any():
            return True
        for name in names:
            rest = name[len(so_far) :] + b'"'
            _clear(mask, [self._texts.beginning_with(rest)])
            _clear(mask, [self._texts.equal_to(rest[:end]) for end in range(1, len(rest))])
        # If not right here, then further on the way to one of these.
        longer = sorted({name[: len(so_far) + 1] for name in names if len(name) > len(so_far)})
        return bool(mask.any()) or any(self._branches(obj, matcher, begun, one) for one in longer)

    def _mask_at(self, obj: _Object, matcher: LLMatcher, begun: bytes, name: bytes) -> Mask:
        """The mask after a whole name, before the quote that ends it. Keeps the masks on the way."""
        after: LLMatcher | None = None
        is_way = True
        for end in range(len(begun), len(name) + 1):
            if name[:end] in obj.masks and after is None:
                continue
            if after is None:
                after = matcher.deep_copy()
                is_way = after.consume_tokens(self._bytes_of(name[len(begun) : end]))
            elif end > len(begun):
                is_way = is_way and after.consume_tokens(self._bytes_of(name[end - 1 : end]))
            # A listed name does not count as one of a pattern.
            mask = np.frombuffer(after.compute_bitmask(), np.uint32)
            obj.masks[name[:end]] = mask if is_way else np.zeros_like(mask)
        return obj.masks[name]

    def _bytes_of(self, text: bytes) -> list[int]:
        return [int(self._texts.equal_to(text[idx : idx + 1])[0]) for idx in range(len(text))]


def _allowed(mask: Mask, ids: NDArray[np.int64]) -> list[int]:
    return ids[(mask[ids >> 5] >> (ids & 31).astype(np.uint32) & 1).astype(bool)].tolist()


def _clear(mask: Mask, ids: list[NDArray[np.int64]]) -> None:
    for some in ids:
        np.bitwise_and.at(mask, some >> 5, ~(np.uint32(1) << (some & 31).astype(np.uint32)))
