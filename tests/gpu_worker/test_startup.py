"""Sizes by the settings, and devices."""

import pytest
import torch
from transformers import LlamaConfig

from gpu_worker.config import WorkerSettings
from gpu_worker.startup import choose_device, choose_geometry


def test_sizes_follow_the_settings_and_name_what_would_fit() -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        max_position_embeddings=256,
    )
    cpu = torch.device("cpu")

    def sizes(**settings: object) -> object:
        return choose_geometry(WorkerSettings(**settings), config, cpu, torch.float32)

    default = sizes()
    assert (default.max_rows, default.max_length, default.page_size) == (32, 256, 64)
    assert default.num_pages == 32 * 4 + 1
    # A page of 64 tokens: K and V, one layer, one head of 16, four bytes.
    assert sizes(pool_bytes=8192 * 5).num_pages == 5
    assert sizes(num_pages=3).max_length == 128
    with pytest.raises(ValueError, match="max_length is 300; the model's limit is 256"):
        sizes(max_length=300)
    with pytest.raises(ValueError, match="needs num_pages 5; the pool has 3"):
        sizes(max_length=256, num_pages=3)
    with pytest.raises(ValueError, match="pool_bytes is 9000, which is too small; two pages of 8192 bytes"):
        sizes(pool_bytes=9000)
    with pytest.raises(ValueError, match="page_size is 48; it must be a power of two"):
        sizes(page_size=48)
    with pytest.raises(ValueError, match="token_budget is 16; it must be at least 96"):
        sizes(token_budget=16)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "meta"])
def test_unknown_devices_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device is {name}"):
        choose_device(name)
