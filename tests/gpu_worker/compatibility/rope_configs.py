"""Tiny configs of models with rotary tables that depend on the longest text of a batch."""

from transformers import LlamaConfig, Phi3Config

from tests.census.shrink import HEAD_DIM, MAX_LENGTH, tiny_config


def phi3(*, threshold: int) -> Phi3Config:
    config = tiny_config(Phi3Config, {"sliding_window": None})
    config.original_max_position_embeddings = threshold
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": threshold,
        "factor": MAX_LENGTH / threshold,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [1.5, *map(float, range(2, HEAD_DIM // 2 + 1))],
    }
    return config


def dynamic(*, length: int) -> LlamaConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return tiny_config(LlamaConfig, {"max_position_embeddings": length, "rope_parameters": rope})
