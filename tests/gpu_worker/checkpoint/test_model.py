"""The state of a loaded model, and linear layers in oneDNN's layout."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.attention.paged import ATTENTION_NAME
from gpu_worker.checkpoint.files import read_files
from gpu_worker.checkpoint.linear import PackedLinear, can_pack
from gpu_worker.checkpoint.loading import load_weights, weight_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        max_position_embeddings=256,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [3, 5]}'
    )
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


def test_weights_load_with_paged_attention(saved: Path) -> None:
    files = read_files(saved)
    model = load_weights(files, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert not model.training


def test_the_ledger_counts_packed_weights(saved: Path) -> None:
    files = read_files(saved)
    model = load_weights(files, device=torch.device("cpu"), dtype=torch.float32)
    # Embedding and head of 40 × 32; q and o of 32 × 32, k and v of 32 × 16; three of 32 × 48; three norms of 32.
    assert weight_bytes(model) == 4 * (2 * 1280 + 2 * 1024 + 2 * 512 + 3 * 1536 + 3 * 32)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_packed_linears_compute_what_plain_ones_do(bias: bool, num_tokens: int) -> None:
    assert can_pack(torch.device("cpu"), torch.float32)
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(1, num_tokens, 48)
    with torch.inference_mode():
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        packed = PackedLinear(linear)
        assert (packed(x).double() - exact).abs().max() < 1e-5
        # Some models compute with a layer's weight directly.
        assert torch.equal(packed.weight, linear.weight)
        assert (packed.in_features, packed.out_features) == (48, 80)
