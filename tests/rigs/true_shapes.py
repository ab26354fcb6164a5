"""The configs of published models in their true size."""

from typing import Any

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Each entry: Transformers' name of the family, and the fields of its config, as published with the checkpoint.
TRUE_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.2-1B": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rope_parameters": _LLAMA_ROPE,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-2-2b": (
        "gemma2",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
}
