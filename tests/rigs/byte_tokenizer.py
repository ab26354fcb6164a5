"""A byte-level tokenizer for the checking worker, as tokenizer.json and as plain functions.

Owns the vocabulary: ids 0 … 255 are bytes; then come pieces of several bytes that no text encodes to but that may be
sampled (whole words, halves of characters, halves of stop strings), the end of sequence, and special tokens that are
never sampled. Needs no tokenizer library.
"""

import json
from collections.abc import Iterable

PIECES: tuple[bytes, ...] = (
    b" the",
    b"ab",
    "é".encode(),
    "日本".encode(),
    "日".encode()[:2],
    "日".encode()[2:] + b"z",
    "😀".encode()[:2],
    "😀".encode()[2:],
    b"STOP",
    b"ST",
    b"OP",
    b"\n\n",
    b", ",
    "ß".encode()[1:] + b"x",
    b"y" + "ß".encode()[:1],
    "a\u0301".encode(),
)
EOS_ID = 256 + len(PIECES)
NUM_DRAWN = EOS_ID + 1
VOCAB_SIZE = 288
# A token for prompts; with `--nonfinite-token POISON_ID` a worker reports nonfinite logits after it.
POISON_ID = 280


def byte_characters() -> list[str]:
    """The printable character for each byte, as byte-level BPE vocabularies write it (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


_CHARACTERS = byte_characters()


def special_name(token: int) -> str:
    return "<eos>" if token == EOS_ID else f"<special-{token}>"


def tokenizer_json() -> bytes:
    """The tokenizer.json that a worker's Join carries."""
    written = [*(bytes([byte]) for byte in range(256)), *PIECES]
    vocab = {"".join(_CHARACTERS[byte] for byte in piece): token for token, piece in enumerate(written)}
    special = range(EOS_ID, VOCAB_SIZE)
    vocab |= {special_name(token): token for token in special}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": token, "content": special_name(token), **flags} for token in special]
    return byte_level_json(vocab, added)


def byte_level_json(vocab: dict[str, int], added_tokens: list[dict[str, object]]) -> bytes:
    """A tokenizer.json of byte-level pieces without merges, so that text encodes to one token per byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added_tokens,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        }
    ).encode()


def token_bytes(token: int) -> bytes:
    """The token's bytes; none for special tokens."""
    if token < 256:
        return bytes([token])
    return PIECES[token - 256] if token < EOS_ID else b""


def decode(tokens: Iterable[int]) -> str:
    """The tokens' text without special tokens; malformed UTF-8 is replaced."""
    return b"".join(map(token_bytes, tokens)).decode("utf-8", errors="replace")
