"""llguidance's tokenizer as constraints need it: text is made of ordinary tokens, whatever it says.

llguidance tokenizes forced text with the model's tokenizer, which takes the text of a control token for that token.
Then a literal with `<|im_end|>` in it would end the output there, or fail. Control tokens are here those that
llguidance never matches as text (special ones, and those that look like <this>), and the model's EOS tokens.
"""

from collections.abc import Sequence

from llguidance import LLTokenizer


class _Ordinary:
    """The tokenizer for texts, as llguidance calls it (its `TokenizerWrapper`)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, inner: LLTokenizer) -> None:
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
        # The longest tokens of the trie, where control tokens are no text.
        return tokens if self._control.isdisjoint(tokens) else self.whole.greedy_tokenize(text)


def constraint_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer of a model; without EOS tokens llguidance takes one itself. Raises what llguidance raises."""
    return _Ordinary(LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)).whole
