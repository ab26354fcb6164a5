"""Checkpoints' folders with tokenizers of several kinds, with their tokens in several files. Without weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Of the models; every tokenizer has fewer tokens.
VOCAB_SIZE = 400
WORDS = ("hello", "world", "a", "b", "x", ".", ",", "'", "s", "n't", "don", "<", ">", "tool", "[", "]", "city", "é")
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: idx for idx, piece in enumerate([*alphabet, "he", "ll", "hell", "Ġw", "Ġ.", "<s>", "</s>"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ġ", ".")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return made


def _pieces() -> list[str]:
    letters = sorted({*"".join(WORDS), *"abcdefghijklmnopqrstuvwxyz", "▁"} - {*WORDS})
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *letters, "▁hello", "▁."]


def sentencepiece_bpe() -> Tokenizer:
    """As Llama 2: ▁ for a space, bytes for what has no piece, and the first space is stripped."""
    vocab = {piece: idx for idx, piece in enumerate(_pieces())}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", ".")]
    vocab |= {left + right: len(vocab) + idx for idx, (left, right) in enumerate(merges) if left + right not in vocab}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "<s>", "</s>")])
    return made


def unigram() -> Tokenizer:
    """As T5 and XGLM."""
    scores = [(piece, -1.0 - len(WORDS) / (1 + len(piece))) for piece in _pieces() if not piece.startswith("<0x")]
    made = Tokenizer(models.Unigram(scores, unk_id=0))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    """As BERT."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", *WORDS, "##s", "##o", "hell", *"cdeflnortuwy"]
    made = Tokenizer(models.WordPiece({piece: idx for idx, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def word_level() -> Tokenizer:
    """Words, without a decoder."""
    made = Tokenizer(models.WordLevel({word: idx for idx, word in enumerate(("[UNK]", *WORDS))}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A checkpoint. `files` are JSON by their names, besides tokenizer.json and config.json."""

    make: Callable[[], Tokenizer]
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    added_tokens: dict[str, int] | None = None
    special_tokens_map: dict[str, Any] | None = None
    model_type: str = "qwen3"
    # Vocabulary and merges in files of their own, instead of tokenizer.json.
    is_in_parts: bool = False

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        made = self.make()
        self._json(folder, "config.json", {"model_type": self.model_type, "vocab_size": VOCAB_SIZE})
        self._json(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | self.config)
        for name, content in (("added_tokens", self.added_tokens), ("special_tokens_map", self.special_tokens_map)):
            if content is not None:
                self._json(folder, f"{name}.json", content)
        if not self.is_in_parts:
            made.save(str(folder / "tokenizer.json"))
            return folder
        parts = json.loads(made.to_str())["model"]
        self._json(folder, "vocab.json", parts["vocab"])
        (folder / "merges.txt").write_text("\n".join(" ".join(each) for each in parts["merges"]), encoding="utf-8")
        return folder

    def _json(self, folder: Path, name: str, content: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def token(content: str, **flags: bool) -> dict[str, Any]:
    """An added token as tokenizer_config.json has it."""
    return {"content": content} | FLAGS | flags


def listed(make: Callable[[], Tokenizer], *tokens: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`added_tokens_decoder`: the tokens after the last one of the tokenizer."""
    first = make().get_vocab_size()
    return {str(first + idx): each for idx, each in enumerate(tokens)}


# By kind: tokens with each flag, ordinary and special ones.
NEW = (
    token("<tool>"),
    token("<|end|>", special=True),
    token("[left]", lstrip=True),
    token("[right]", rstrip=True, special=True),
    token("city", single_word=True),
    token("<É>", normalized=True),
    token("<mask>", lstrip=True, rstrip=True, special=True, normalized=True),
)
KINDS = (byte_level, sentencepiece_bpe, unigram, word_piece, word_level)


def folders() -> dict[str, Folder]:
    """The table: every kind of tokenizer with every file, and settings that only AutoTokenizer knows."""
    table: dict[str, Folder] = {}
    for make in KINDS:
        name, first = make.__name__, make().get_vocab_size()
        table |= {
            f"{name}, tokenizer.json alone": Folder(make=make),
            f"{name}, tokenizer_config.json": Folder(
                make=make, config={"added_tokens_decoder": listed(make, *NEW), "eos_token": "<|end|>"}
            ),
            f"{name}, added_tokens.json": Folder(
                make=make, added_tokens={each["content"]: first + idx for idx, each in enumerate(NEW)}
            ),
            f"{name}, special_tokens_map.json": Folder(
                make=make,
                special_tokens_map={
                    "eos_token": token("<|end|>"),
                    "pad_token": "<pad>",
                    "additional_special_tokens": ["<tool>", "[left]"],
                },
            ),
            f"{name}, names": Folder(
                make=make,
                config={"bos_token": "<tool>", "image_token": "<|end|>", "extra_special_tokens": ["[left]", "<mask>"]},
            ),
            f"{name}, clean-up": Folder(make=make, config={"clean_up_tokenization_spaces": True}),
            f"{name}, split special tokens": Folder(
                make=make,
                config={"added_tokens_decoder": listed(make, *NEW), "split_special_tokens": True},
            ),
        }
    parts = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    for flags in ({}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}):
        name = f"vocab.json and merges.txt, {', '.join(flags) or 'no flags'}"
        table[name] = Folder(make=byte_level, is_in_parts=True, config=parts | flags)
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    llama = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    return table | {
        "clean-up of a BPE": Folder(make=byte_level, config={"clean_up_tokenization_spaces": True} | forced),
        "a class with rules of its own": Folder(make=sentencepiece_bpe, model_type="llama", config=llama),
        "a class that adds its own names": Folder(make=sentencepiece_bpe, model_type="llama", config=llama | {
            "pad_token": "<pad>", "add_prefix_space": False,
        }),
    }  # fmt: skip
