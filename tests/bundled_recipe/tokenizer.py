"""The bundled model's tokenizer: a byte-level BPE of its own.

Owns: the vocabulary's size and layout, training, saving. Byte-level, so every text makes the round trip.
Ids 0 to 255 are the bytes, then the merges; the last trained id is `<|endoftext|>`, which ends a document. The tokens
of chats follow (`chat_tokens.py`), and ids without a token up to a multiple of 16.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TRAINED_TOKENS = 4_096
VOCAB_SIZE = 4_112
EOS_TOKEN = "<|endoftext|>"
EOS_ID = TRAINED_TOKENS - 1


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Learn the merges from `documents`; the same documents give the same merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=EOS_ID,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([EOS_TOKEN])
    if tokenizer.token_to_id(EOS_TOKEN) != EOS_ID:
        raise ValueError(f"the corpus is too small for {TRAINED_TOKENS} tokens: got {tokenizer.get_vocab_size()}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that Transformers wants beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
