"""Models with random weights: families in their true architecture and size, and tiny ones of the same families.

Owns the shapes, and the checkpoint that a worker process loads. No weights are downloaded; speed does not depend on
their values, and eager attention on the same weights is the reference for correctness.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.checkpoint.loading import prepare
from gpu_worker.memory.model_facts import ModelFacts
from tests.measure.workload import save_tokenizer
from tests.rigs.true_shapes import TRUE_SHAPES

_NO_SPECIAL_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
# One of each way in which attention differs: groups, windows, soft-capping, learned sinks.
TINY_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny Qwen3": ("qwen3", _TINY | {"tie_word_embeddings": True}),
    "tiny Llama": ("llama", _TINY | {"num_key_value_heads": 4}),
    "tiny Mistral, window 40": ("mistral", _TINY | {"sliding_window": 40}),
    "tiny Gemma 2, window 40": (
        "gemma2",
        _TINY | {"sliding_window": 40, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0},
    ),
    "tiny gpt-oss, window 40": (
        "gpt_oss",
        _TINY | {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    ),
}


# Of tiny runs. All parts share them, so that a CPU compiles few kernels.
TINY_MODEL = "tiny Qwen3"
TINY_SIZES: dict[str, Any] = {"max_rows": 4, "max_length": 256, "token_budget": 192, "num_pages": 20}


def config_of(shape: str) -> PreTrainedConfig:
    """The config of a shape of either table."""
    family, fields = (TRUE_SHAPES | TINY_SHAPES)[shape]
    return AutoConfig.for_model(family, **_NO_SPECIAL_TOKENS | fields)


def random_model(
    config: PreTrainedConfig, facts: ModelFacts, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A model as the worker holds one after loading, with random weights that depend on nothing else."""
    register()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return prepare(model, device=device, dtype=dtype, merged=facts.merged)


def save_model(config: PreTrainedConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """Writes a checkpoint: config, weights, and a tokenizer in which every token is some text."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size, letters=4)
    return folder
