"""Owns the tokenizers of these tests: bytes and a few merges, so that a token border can be anywhere."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel

# The id of byte b is b. The merges follow, then the special tokens.
MERGES = ("th", "he", "the", "in", "ing", " a", "stop", "é", "€", " 😀")
EOS = "<eos>"
BOS = "<bos>"


def _alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


ALPHABET = _alphabet()
assert set(ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())


@functools.cache
def byte_level() -> Tokenizer:
    """256 bytes and whole-word merges. It does not add <bos>."""
    vocab = {ALPHABET[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in MERGES:
        symbols = [ALPHABET[byte] for byte in word.encode()]
        left = symbols[0]
        for right in symbols[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


@functools.cache
def with_special_tokens(form: str) -> Tokenizer:
    """`byte_level` with the special tokens of a form, such as `<bos> $A`, around each text."""
    made = Tokenizer.from_str(byte_level().to_str())
    ids = [(name, made.token_to_id(name)) for name in (BOS, EOS)]
    made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    return made


def as_json(tokenizer: Tokenizer) -> bytes:
    text = tokenizer.to_str()
    assert json.loads(text)
    return text.encode()


def token(text: str) -> int:
    """The id of one token of the byte-level tokenizer."""
    token_id = byte_level().token_to_id("".join(ALPHABET[byte] for byte in text.encode()))
    assert token_id is not None
    return token_id


def spell(data: bytes) -> list[int]:
    """One token per byte."""
    return list(data)


@functools.cache
def sentencepiece_like() -> dict[str, Tokenizer]:
    """Decoders of SentencePiece's kind by name. Their vocabulary has white space in several tokens, bytes, U+FFFD."""
    words = ["<unk>", "▁", "▁▁", "▁the", "the", "▁a", "a", ".", "\ufffd", "é", "▁é", "\n", "▁cat", "s"]
    fallback, space = decoders.ByteFallback(), decoders.Replace("▁", " ")
    kinds = {
        "llama": decoders.Sequence([space, fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        "gemma": decoders.Sequence([space, fallback, decoders.Fuse()]),
        "first": decoders.Metaspace(prepend_scheme="first"),
        "always": decoders.Sequence([fallback, decoders.Metaspace(prepend_scheme="always")]),
    }
    found = dict[str, Tokenizer]()
    for name, decoder in kinds.items():
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if name != "first" else []
        vocab = {word: i for i, word in enumerate([words[0], *bytes_, *words[1:]])}
        made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
        made.decoder = decoder
        made.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
        found[name] = made
    return found
