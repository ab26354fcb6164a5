"""One trial of a grammar: compile it, compute the first mask, and walk through 64 masks at random.

Owns the words of a refusal. Knows nothing of sockets or processes. The walk of one grammar is always the same.
"""

import random
import time
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tandem_contract.grammar_limits import MASK_SECONDS, limit_words

NUM_MASKS = 64


class Trial:
    """Tries grammars with one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: Sequence[int], slowness: float = 1.0) -> None:
        """`eos_token_ids` are the model's. `slowness` multiplies limits."""
        self._tokenizer, self.slowness = tokenizer, slowness
        self._eos = frozenset(eos_token_ids)
        # What llguidance takes for the end although it is not the model's.
        self._hidden = [token for token in tokenizer.eos_tokens if token not in self._eos]

    def refusal(self, grammar: str) -> str:
        """Returns why the grammar is refused, in one sentence; empty if it is not."""
        try:
            return self._walk(grammar)
        # llguidance's panics are no Exceptions.
        except BaseException as error:
            return f"llguidance: {type(error).__name__}: {_reason(str(error))}"

    def _walk(self, grammar: str) -> str:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        rng = random.Random(sha256(grammar.encode()).digest())
        for step in range(NUM_MASKS + 1):
            if matcher.is_error():
                return f"llguidance: {_reason(matcher.get_error())}"
            if matcher.is_stopped():
                return "" if matcher.is_accepting() else f"llguidance stopped: {matcher.stop_reason()}"
            begun = time.thread_time()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            seconds = time.thread_time() - begun
            if matcher.is_error():
                continue
            if seconds > MASK_SECONDS * self.slowness:
                took = f"the mask of output token {step + 1} took {seconds * 1e3:.0f} ms of CPU time"
                return f"{took}; {limit_words(MASK_SECONDS, self.slowness)}"
            allowed = bits.nonzero()[0]
            allowed = allowed[~np.isin(allowed, [*self._hidden, *self._too_early(matcher, bits)])]
            if not len(allowed):
                return f"no token of the model may come as output token {step + 1}"
            token = int(allowed[rng.randrange(len(allowed))])
            if token in self._eos:
                return ""
            matcher.consume_token(token)
        return ""

    def _too_early(self, matcher: LLMatcher, bits: NDArray[np.uint8]) -> list[int]:
        """The EOS tokens of a mask that do not complete the output. A grammar may name one where more must follow."""
        found = [token for token in self._eos if bits[token]]
        if not found or matcher.is_accepting():
            return []
        copies = [(token, matcher.deep_copy()) for token in found]
        return [token for token, after in copies if not (after.consume_token(token) and after.is_accepting())]


def _reason(text: str) -> str:
    """The first line of llguidance's message, and the cause of a refused pattern; other lines show what was parsed."""
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Write anyOf")
    first, *others = text.strip().splitlines() or [""]
    cause = next((line.removeprefix("error:") for line in others if line.startswith("error:")), "")
    return first.removesuffix(" regex parse error:") + cause
