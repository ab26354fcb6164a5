"""Models: what is refused and why, what Join will say, and the identity."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.attention import ATTENTION_NAME
from gpu_worker.config import WorkerSettings
from gpu_worker.linear import PackedLinear, can_pack
from gpu_worker.model import check_config, load_weights, weight_bytes
from gpu_worker.model_files import ModelRefused, identity, locate, read_files
from gpu_worker.startup import choose_device, choose_geometry


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
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [3, 5]}'
    )
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


def changed(saved: Path, tmp_path: Path, **config: object) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(saved, folder)
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_what_join_says_comes_from_the_files(saved: Path) -> None:
    files = read_files(saved, trust_remote_code=False)
    assert files.eos_token_ids == (3, 5)
    assert (files.temperature, files.top_p, files.top_k, files.min_p) == (0.6, 0.95, 20, 0.0)
    assert files.tokenizer_json == b'{"version": "1.0"}'
    assert files.chat_template == "{{ messages }}"


def test_without_do_sample_the_default_is_greedy(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path)
    (folder / "generation_config.json").unlink()
    files = read_files(folder, trust_remote_code=False)
    assert (files.temperature, files.top_p, files.top_k) == (0.0, 1.0, 0)
    assert files.eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "model type gpt2 is not proven yet"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type dynamic chooses one table from the longest sequence",
        ),
        ({"head_dim": 24}, "head dimension 24 is not served"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights are not served yet"),
    ],
)
def test_refused_with_the_reason(saved: Path, tmp_path: Path, config: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelRefused, match=problem):
        check_config(read_files(changed(saved, tmp_path, **config), trust_remote_code=False).config)


def test_only_safetensors_are_read(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    files = read_files(folder, trust_remote_code=False)
    with pytest.raises(ModelRefused, match=r"has no \*\.safetensors"):
        load_weights(files, device=torch.device("cpu"), dtype=torch.float32, trust_remote_code=False)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ModelRefused, match="/no/such/model does not exist"):
        locate("/no/such/model")


def test_weights_load_with_paged_attention(saved: Path) -> None:
    files = read_files(saved, trust_remote_code=False)
    model = load_weights(files, device=torch.device("cpu"), dtype=torch.bfloat16, trust_remote_code=False)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert not model.training


def test_identity_follows_weights_config_tokenizer_and_page_size(saved: Path, tmp_path: Path) -> None:
    def identity_of(folder: Path, page_size: int = 64) -> str:
        return identity(read_files(folder, trust_remote_code=False), page_size)

    base = identity_of(saved)
    assert base == identity_of(saved)
    assert base != identity_of(saved, page_size=128)
    folder = changed(saved, tmp_path)
    assert identity_of(folder) == base
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert identity_of(folder) != base
    shutil.copy(saved / "model.safetensors", folder)
    assert identity_of(folder) == base
    (folder / "tokenizer.json").write_text('{"version": "2.0"}')
    assert identity_of(folder) != base


def test_sizes_follow_the_settings_and_name_what_would_fit(saved: Path) -> None:
    config = read_files(saved, trust_remote_code=False).config
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
    with pytest.raises(ValueError, match="num_pages is 3 and pool_bytes 9000; set one, a page takes 8192 bytes"):
        sizes(num_pages=3, pool_bytes=9000)
    with pytest.raises(ValueError, match="pool_bytes is 9000, which is too small; two pages of 8192 bytes"):
        sizes(pool_bytes=9000)
    with pytest.raises(ValueError, match="page_size is 48; it must be a power of two"):
        sizes(page_size=48)
    with pytest.raises(ValueError, match="token_budget is 16; it must be at least 96"):
        sizes(token_budget=16)


def test_the_ledger_counts_packed_weights(saved: Path) -> None:
    files = read_files(saved, trust_remote_code=False)
    model = load_weights(files, device=torch.device("cpu"), dtype=torch.float32, trust_remote_code=False)
    # Embedding and head of 40 × 32; q and o of 32 × 32, k and v of 32 × 16; three of 32 × 48; three norms of 32.
    assert weight_bytes(model) == 4 * (2 * 1280 + 2 * 1024 + 2 * 512 + 3 * 1536 + 3 * 32)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "meta"])
def test_unknown_devices_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device is {name}"):
        choose_device(name)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_packed_linears_compute_what_plain_ones_do(bias: bool, num_tokens: int) -> None:
    assert can_pack(torch.device("cpu"), torch.float32)
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(1, num_tokens, 48)
    with torch.inference_mode():
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        assert (PackedLinear(linear)(x).double() - exact).abs().max() < 1e-5
