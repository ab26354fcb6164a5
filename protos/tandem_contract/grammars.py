"""What the processes of llguidance, a front end's trial and a worker's mask server, share: limits and tokenizer.

Limits of CPU time are in seconds of the reference machine, so a machine that is busy or slow refuses nothing that a
quiet one takes. A process measures its machine once, at its start: by the CPU time of `_GRAMMAR` and its first mask.

llguidance tokenizes forced text with the model's tokenizer, which takes the text of a control token for that token.
Then a literal with `<|im_end|>` in it would end the output there, or fail. Control tokens are here those that
llguidance never matches as text (special ones, and those that look like <this>), and the model's EOS tokens. The
processes alone need llguidance, which is loaded when it is first used.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# CPU seconds of a mask, and of compiling a grammar with its first mask; a trial, with 64 masks, may take as long.
MASK_SECONDS, COMPILE_SECONDS = 0.25, 2.0
# Wall time for the imports and the largest tokenizers.
START_SECONDS = 60.0
_GRAMMAR = "start: /(x{100}){100}/"
# CPU time on the reference machine: one core of an AMD EPYC, of which a virtual machine has two.
REFERENCE_MS = 9.0
# A limit is never shorter than on the reference machine, and never longer than four times that.
LEAST, MOST = 1.0, 4.0
# The shortest time counts; in the others the CPU had other work too.
_NUM_TRIES = 3


def limit_words(seconds: float, slowness: float) -> str:
    """The limit on a machine that is `slowness` times as slow as the reference."""
    limit, of_reference = shown(seconds * slowness), shown(seconds)
    return f"the limit is {limit} of CPU time ({of_reference} x {slowness:g}, for the speed of this machine)"


def shown(seconds: float) -> str:
    """As people read it."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


class _Ordinary:
    """The tokenizer for texts, as llguidance calls it (its `TokenizerWrapper`)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, inner: "LLTokenizer") -> None:
        from llguidance import LLTokenizer

        self._inner = inner
        ids, self.eos_token_id = range(inner.vocab_size), inner.eos_token
        self.special_token_ids = sorted({*filter(inner.is_special_token, ids), *inner.eos_tokens})
        self._control = frozenset(self.special_token_ids)
        self.tokens = [inner.decode_bytes([token]) for token in ids]
        self.whole = LLTokenizer(self, n_vocab=inner.vocab_size, eos_token=inner.eos_tokens)  # type: ignore[arg-type]
        # It was copied.
        self.tokens = []

    def __call__(self, text: str) -> list[int]:
        tokens = self._inner.tokenize_str(text)
        # The longest tokens of the trie, where control tokens are not text.
        return tokens if self._control.isdisjoint(tokens) else self.whole.greedy_tokenize(text)


def constraint_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """The tokenizer of a model; without EOS tokens llguidance takes one itself. Raises what llguidance raises."""
    from llguidance import LLTokenizer

    return _Ordinary(LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)).whole


def may_end(matcher: "LLMatcher", eos: int) -> bool:
    """Whether the output is complete with EOS. A grammar may name the token where more must follow."""
    if matcher.is_accepting():
        return True
    after = matcher.deep_copy()
    return after.consume_token(eos) and after.is_accepting()


def slowness() -> float:
    """By what limits are multiplied: LEAST to MOST. Takes some 30 ms."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer, tries = LLTokenizer("byte"), list[float]()
    for _ in range(_NUM_TRIES):
        begun = time.thread_time()
        LLMatcher(tokenizer, _GRAMMAR, log_level=0).compute_bitmask()
        tries.append(time.thread_time() - begun)
    return bounded(min(tries) * 1e3 / REFERENCE_MS)


def bounded(ratio: float) -> float:
    """A measured ratio within its bounds, in steps of 0.01."""
    return round(min(max(ratio, LEAST), MOST), 2)
