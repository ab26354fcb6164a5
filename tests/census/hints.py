"""Settings that single families need beyond the rules of shrink.py, to be built tiny or to show all their layers."""

from typing import Any

from tests.census.shrink import HEAD_DIM, HIDDEN_SIZE, MAX_LENGTH, NUM_HEADS, NUM_KV_HEADS, ODD_HEAD_DIM

_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _SLIDING_AND_FULL * 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 24,
    "laurel_rank": 8,
}
_GEMMA4 = {"global_head_dim": HEAD_DIM, "hidden_size_per_layer_input": 24}
_GEMMA4_ASSISTANT = {
    "global_head_dim": HEAD_DIM,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 2,
    "layer_types": _SLIDING_AND_FULL,
}
# Models with learned positions.
_ODD_HIDDEN_SIZE = NUM_HEADS * ODD_HEAD_DIM
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 3, 3]},
    "full_attention": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [4, 3, 3]},
}

HINTS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": _ODD_HIDDEN_SIZE},
    "gpt2": {"n_embd": _ODD_HIDDEN_SIZE},
    "opt": {"hidden_size": _ODD_HIDDEN_SIZE, "word_embed_proj_dim": _ODD_HIDDEN_SIZE},
    "axk1": {"num_hidden_layers": 2},
    "cohere_compass_text": {"layer_types": _SLIDING_AND_FULL, "rope_parameters": _TWO_ROPES},
    "dbrx": {
        "attn_config": {"kv_n_heads": NUM_KV_HEADS, "rope_theta": 1e4, "clip_qkv": 2.0},
        "max_seq_len": MAX_LENGTH,
        "ffn_config": {"hidden_size": HIDDEN_SIZE, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    # Its rotated part is read as pairs, in place.
    "deepseek_v2": {"num_experts_per_tok": 2, "qk_nope_head_dim": HEAD_DIM + 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": HIDDEN_SIZE, "adapter_out_dim": HIDDEN_SIZE},
        "audio_config": {"adapter_input_size": HIDDEN_SIZE, "adapter_out_dim": HIDDEN_SIZE},
    },
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gemma4_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "laguna": {"num_attention_heads_per_layer": [NUM_HEADS] * 2, "layer_types": _SLIDING_AND_FULL},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 16,
        "index_topk_blocks": 1,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "nemotron": {"num_key_value_heads": NUM_KV_HEADS},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}

# Classes that cannot be built or run alone here, and Transformers' messages.
_LACKS_A_CACHE = (
    "ValueError: The set of layer types producing a cache",
    "ValueError: inputs_embeds and shared_kv_states cannot be None",
)
UNBUILDABLE: dict[str, tuple[str, ...]] = {
    "gemma3n": ("ImportError: TimmWrapperModel requires the timm library",),
    # These draft for another model and read its cache.
    "gemma4_assistant": _LACKS_A_CACHE,
    "gemma4_unified_assistant": _LACKS_A_CACHE,
}
