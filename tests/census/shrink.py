"""Tiny configs: any config class of Transformers, with every size made small and every kind of layer kept.

Owns rules by attribute name, which hold for most families; settings that a single family needs beyond
these rules are in hints.py.
"""

from typing import Any

from transformers import PreTrainedConfig

from gpu_worker.sharding.trial import COUNTS, fewer_layers

VOCAB_SIZE = 131
# Tokens that configs name; prompts are drawn from those between.
PAD_TOKEN, LAST_SPECIAL_TOKEN = 1, VOCAB_SIZE - 1
# One head geometry for all, so that compiled kernels are reused. Heads are not a multiple of any vector of kernels,
# and odd where nothing is rotated.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, ODD_HEAD_DIM = 4, 2, 20, 21
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM
WINDOW = 21
MAX_LENGTH = 256
_MAX_KINDS = 6
# Sub-configs without which some classes refuse their own defaults.
_NEEDED_SUBS = ("text_config", "attn_config", "ffn_config")

RULES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), HIDDEN_SIZE),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_attn_heads"), NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads"), NUM_KV_HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "mlp_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 48),
    "shared_intermediate_size": 48,
    "max_position_embeddings": MAX_LENGTH,
    "n_positions": MAX_LENGTH,
    "original_max_position_embeddings": MAX_LENGTH,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": HEAD_DIM,
    "qk_nope_head_dim": ODD_HEAD_DIM,
    "v_head_dim": ODD_HEAD_DIM + 2,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "index_n_heads": 2,
    "index_head_dim": 2 * HEAD_DIM,
    "index_topk": 8,
    "attention_chunk_size": 40,
    # Encoders run as decoders here.
    "is_decoder": True,
}
# Drawn at random or of another vocabulary.
_DROPPED = {
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "rope_scaling",
    "per_layer_config",
}


def tiny_config(config_class: type[PreTrainedConfig], hint: dict[str, Any]) -> PreTrainedConfig:
    """A small config of the class; `hint` overrides the rules, by name, with sub-configs as dicts."""
    given = {
        name: value for name, value in hint.items() if not isinstance(value, dict) or name not in subs(config_class)
    }
    # Some classes refuse their own defaults without sub-configs.
    default = config_class(**{k: v for k, v in hint.items() if k in subs(config_class) and k in _NEEDED_SUBS})
    settings = _shrunk(default, given)
    for name in subs(config_class):
        sub = getattr(default, name, None)
        if isinstance(sub, PreTrainedConfig):
            small = tiny_config(type(sub), hint.get(name, {})).to_dict()
            settings[name] = {k: v for k, v in small.items() if not k.startswith("_") and k != "output_attentions"}
    return config_class(**settings | given)


def subs(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Sub-configs that the class names."""
    return dict(getattr(config_class, "sub_configs", None) or {})


def _shrunk(default: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    values = default.to_dict()
    renamed = {value: key for key, value in (getattr(default, "attribute_map", None) or {}).items()}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name in _DROPPED or name.startswith("_") or (value is None and name not in ("head_dim",)):
            continue
        if name.endswith(("token_id", "token_index", "token_ids")):
            settings[name] = PAD_TOKEN if name == "pad_token_id" else LAST_SPECIAL_TOKEN
        elif "dropout" in name or name.endswith("_pdrop"):
            settings[name] = 0.0
        rule = RULES.get(name, RULES.get(renamed.get(name, "")))
        if rule is not None and not isinstance(value, (list, dict)):
            settings[name] = rule
    if "sliding_window" in values and not isinstance(values["sliding_window"], (list, dict)):
        settings["sliding_window"] = WINDOW
    if "use_sliding_window" in values:
        # Such classes derive their layers' types from these.
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
        given = {"layer_types": None} | given
    if "kv_lora_rank" in values:
        # Latent attention has separate keys for every head.
        settings["num_key_value_heads"] = NUM_HEADS
    if not any(name in values for name in COUNTS):
        return settings
    own = {name: value for name, value in values.items() if name not in given or not isinstance(value, list)}
    return settings | fewer_layers(own, most=_MAX_KINDS)
