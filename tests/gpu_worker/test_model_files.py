"""The model's folder: what Join says of it, what is refused, and its identity."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.loading import load_weights
from gpu_worker.model_files import ModelRefused, identity, locate, read_files


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
    files = read_files(saved)
    assert files.eos_token_ids == (3, 5)
    assert (files.temperature, files.top_p, files.top_k, files.min_p) == (0.6, 0.95, 20, 0.0)
    assert files.tokenizer_json == b'{"version": "1.0"}'
    assert files.chat_template == "{{ messages }}"


def test_without_do_sample_the_default_is_greedy(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path)
    (folder / "generation_config.json").unlink()
    files = read_files(folder)
    assert (files.temperature, files.top_p, files.top_k) == (0.0, 1.0, 0)
    assert files.eos_token_ids == (3,)


def test_only_safetensors_are_read(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    files = read_files(folder)
    with pytest.raises(ModelRefused, match=r"has no \*\.safetensors"):
        load_weights(files, device=torch.device("cpu"), dtype=torch.float32)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ModelRefused, match="/no/such/model does not exist"):
        locate("/no/such/model")


def test_identity_follows_weights_config_tokenizer_and_page_size(saved: Path, tmp_path: Path) -> None:
    def identity_of(folder: Path, page_size: int = 64) -> str:
        return identity(read_files(folder), page_size)

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
