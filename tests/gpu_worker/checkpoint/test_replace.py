"""Weights are replaced in place: tied, merged and packed layers, native norms; every pointer is kept."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel, Qwen2Config

from gpu_worker.checkpoint.files import ModelFiles, read_files
from gpu_worker.checkpoint.folder import opened_weights
from gpu_worker.checkpoint.linear import PackedLinear
from gpu_worker.checkpoint.loading import load_plain, prepare
from gpu_worker.compatibility.new_weights import check_targets, read_weights, replace_weights

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
GROUPS = tuple(tuple(f"model.layers.{i}.self_attn.{name}_proj" for name in "qkv") for i in range(2))
# Qwen 2 has biases, Gemma 2 norms with 1 + w and a tied head.
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "gemma2": Gemma2Config(**SIZES, head_dim=4, tie_word_embeddings=True),
}


def save(config: Any, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)


@pytest.fixture(params=list(CONFIGS))
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    for name, seed in (("old", 1), ("new", 2)):
        save(CONFIGS[request.param], tmp_path / name, seed)
    return tmp_path / "old", tmp_path / "new"


def loaded(files: ModelFiles, *, merges: bool) -> PreTrainedModel:
    model = load_plain(files, dtype=torch.float32)
    return prepare(model, device=torch.device("cpu"), dtype=torch.float32, merged=GROUPS if merges else ())


def pointers(model: nn.Module) -> dict[str, int]:
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return found | {
        name: module._packed.data_ptr()
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and module.is_native
    }


@torch.inference_mode()
def states(model: PreTrainedModel) -> list[Tensor]:
    """What every layer that has weights returns for a fixed input, and the norms."""
    found: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "in_features"):
            torch.manual_seed(3)
            found.append(module(torch.randn(1, 3, int(module.in_features))))
        elif type(module).__name__.endswith("RMSNorm"):
            found.append(module(torch.linspace(-2, 3, 16).view(1, 1, 16)))
        elif isinstance(module, nn.Embedding):
            found.append(module(torch.arange(5)))
    return found


@pytest.mark.parametrize("merges", [False, True])
def test_the_model_computes_as_if_it_had_been_loaded_from_the_new_folder(
    folders: tuple[Path, Path], merges: bool
) -> None:
    old, new = map(read_files, folders)
    model, fresh = loaded(old, merges=merges), loaded(new, merges=merges)
    before = pointers(model)
    assert not torch.equal(states(model)[0], states(fresh)[0])
    weights = read_weights(new, torch.float32)
    check_targets(model, weights)
    replace_weights(model, weights)
    assert pointers(model) == before
    for ours, expected in zip(states(model), states(fresh), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("folders", ["qwen2"], indirect=True)
def test_a_folder_that_changes_while_it_is_copied_is_noticed(folders: tuple[Path, Path]) -> None:
    old, new = map(read_files, folders)
    model, weights = loaded(old, merges=False), read_weights(new, torch.float32)
    shutil.rmtree(folders[1])
    with pytest.raises(RuntimeError, match="changed while they were copied"):
        replace_weights(model, weights)


def test_weights_read_through_open_files_are_those_of_the_folder(folders: tuple[Path, Path]) -> None:
    plain = read_weights(read_files(folders[1]), torch.float32).tensors
    with opened_weights(str(folders[1]), [str(folders[1].parent)]) as view:
        found = read_weights(read_files(view), torch.float32)
        assert found.tensors.keys() == plain.keys()
        assert all(torch.equal(found.tensors[name], plain[name]) for name in plain)
        (folders[1] / "model.safetensors").unlink()
        assert found.has_changed()
