"""A published checkpoint of a tiny Llama: config, safetensors, tokenizer; and ways to damage it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 40


def save_model(folder: Path, *, shard_bytes: int | str = "1GB", **config: object) -> Path:
    """Random weights; `shard_bytes` makes several files of them."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "eos_token_id": 3,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings | config)).save_pretrained(folder, max_shard_size=shard_bytes)
    (folder / "tokenizer.json").write_text(tokenizer_json(VOCAB_SIZE))
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [3, 5]}'
    )
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}'
    )
    return folder


def tokenizer_json(num_tokens: int, *, added: str = "") -> str:
    tokenizer = Tokenizer(WordLevel({f"word{i}": i for i in range(num_tokens)}, unk_token="word0"))
    if added:
        tokenizer.add_tokens([added])
    return tokenizer.to_str()


def changed(saved: Path, folder: Path, **config: object) -> Path:
    """A copy in `folder`, with other fields in config.json."""
    shutil.copytree(saved, folder)
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def with_tensors(folder: Path, tensors: Mapping[str, Tensor | None]) -> Path:
    """The folder, with other tensors in its only file; None removes one."""
    file = folder / "model.safetensors"
    found: dict[str, Tensor | None] = {**load_file(file), **tensors}
    save_file({name: each for name, each in found.items() if each is not None}, file, metadata={"format": "pt"})
    return folder
