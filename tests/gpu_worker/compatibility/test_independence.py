"""Information that passes between tokens outside attention is found, and the model stays unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.compatibility.independence import check_independence, pin
from tests.census.hints import HINTS
from tests.census.shrink import tiny_config
from tests.census.weights import randomize
from tests.gpu_worker.compatibility.rope_configs import dynamic, phi3

LENGTH = 200


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = tiny_config(CONFIG_MAPPING[model_type], HINTS.get(model_type, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    randomize(model, seed=2)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_oss", "mixtral", "deepseek_v3", "gemma3n_text"])
def test_independent_models_pass(model_type: str, dtype: torch.dtype) -> None:
    model = model_of(model_type, dtype)
    before = model.config._attn_implementation
    check_independence(model, LENGTH)
    assert model.config._attn_implementation == before


def shifted(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Adds half of the previous token to each token."""
    return (output + output.roll(1, 1)) / 2


def crowded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Adds the batch's mean to each token."""
    return output - output.mean(1, keepdim=True)


def numbered(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Adds its place in the batch to each token."""
    return output + torch.arange(output.shape[1])[:, None] / output.shape[1]


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (shifted, "reordering it changes its results"),
        (numbered, "reordering it changes its results"),
        (crowded, "depend on the rest of the batch"),
    ],
)
def test_a_model_whose_tokens_depend_on_each_other_is_refused(hook: Callable[..., Tensor], problem: str) -> None:
    model = model_of("llama")
    model.model.layers[1].mlp.register_forward_hook(hook)
    before = model.config._attn_implementation
    with pytest.raises(ModelRefused, match=problem):
        check_independence(model, LENGTH)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("config", [phi3(threshold=64), dynamic(length=60)])
def test_batch_dependent_tables_are_refused_unless_pinned(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    randomize(model, seed=2)
    with pytest.raises(ModelRefused, match="depend on the rest of the batch"):
        check_independence(model, LENGTH)
    assert pin(model, LENGTH) == [config.rope_parameters["rope_type"]]
    check_independence(model, LENGTH)


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "data2vec-text", "xlm-roberta-xl"])
def test_a_model_whose_positions_do_not_count_from_0_is_refused(model_type: str) -> None:
    with pytest.raises(ModelRefused, match="positions do not count from 0"):
        check_independence(model_of(model_type), LENGTH)


def test_static_tables_are_not_pinned() -> None:
    assert pin(model_of("gemma3_text"), LENGTH) == []
