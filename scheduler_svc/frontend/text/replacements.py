"""Owns what a decoder replaces in the whole text of all tokens, made while that text arrives in pieces.

Transformers' clean-up of decoded texts is of this kind: " ." becomes ".". The text that one replacement returns is
what the next one reads, and each holds back the end of its text while that may begin its pattern.
"""

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

# A pattern and what takes its place.
Pair = tuple[str, str]


class Replacer:
    """Replaces in one text."""

    __slots__ = ("_held", "_pairs")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        # By replacement: the end of its text.
        self._held = [""] * len(pairs)

    @property
    def is_empty(self) -> bool:
        """Whether no text is held."""
        return not any(self._held)

    def fork(self) -> "Replacer":
        """Another one, which goes on from here alone."""
        if not self._pairs:
            return self
        other = copy.copy(self)
        other._held = list(self._held)
        return other

    def push(self, text: str) -> str:
        """The text that later text cannot change."""
        for idx, (old, new) in enumerate(self._pairs):
            *before, rest = (self._held[idx] + text).split(old)
            kept = next(size for size in range(len(old) - 1, -1, -1) if rest.endswith(old[:size]))
            self._held[idx] = rest[len(rest) - kept :]
            text = new.join([*before, rest[: len(rest) - kept]])
        return text

    def finish(self) -> str:
        """The held text, at the end."""
        text = ""
        for idx, (old, new) in enumerate(self._pairs):
            text = (self._held[idx] + text).replace(old, new)
            self._held[idx] = ""
        return text


def take_replacements(tokenizer: "tokenizers.Tokenizer") -> tuple[Pair, ...]:
    """Takes the last replacements away from a tokenizer's decoder, if they see the whole text, and returns them."""
    from tokenizers import decoders

    if tokenizer.decoder is None:
        return ()
    spec = json.loads(tokenizer.decoder.__getstate__())
    steps = spec.get("decoders", [])
    num_left = len(steps)
    while num_left and steps[num_left - 1]["type"] == "Replace" and steps[num_left - 1]["pattern"].get("String"):
        num_left -= 1
    # Before a Fuse, a decoder replaces in each token by itself.
    if not num_left or steps[num_left - 1]["type"] != "Fuse":
        return ()
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({**spec, "decoders": steps[:num_left]}).encode())
    tokenizer.decoder = decoder
    return tuple((step["pattern"]["String"], step["content"]) for step in steps[num_left:])
