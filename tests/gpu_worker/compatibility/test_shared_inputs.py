"""Which linear layers of a model receive the same tensor."""

import pytest
import torch
from transformers import DeepseekV3Config, GPTNeoXConfig, LlamaConfig, PreTrainedConfig, Qwen2MoeConfig

from gpu_worker.compatibility.check_model import meta_model_of
from gpu_worker.memory.model_facts import shared_inputs
from tests.census.shrink import tiny_config


def groups_of(config: PreTrainedConfig) -> list[tuple[str, ...]]:
    meta_model = meta_model_of(config, dtype=torch.float32)
    groups = shared_inputs(meta_model)
    first = min(groups, default=("",))[0].partition("layers.")[2].partition(".")[0]
    return [tuple(name.rpartition(".")[2] for name in group) for group in groups if f"layers.{first}." in group[0]]


@pytest.mark.parametrize(
    ("config_class", "expected"),
    [
        (LlamaConfig, [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]),
        # One layer computes queries, keys and values already.
        (GPTNeoXConfig, []),
        (DeepseekV3Config, [("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")]),
    ],
)
def test_layers_of_one_module_with_one_input_form_a_group(
    config_class: type[PreTrainedConfig], expected: list[tuple[str, ...]]
) -> None:
    assert groups_of(tiny_config(config_class, {})) == expected


def test_layers_of_different_modules_do_not() -> None:
    """A router, and experts that each compute from the router's input."""
    names = [name for group in groups_of(tiny_config(Qwen2MoeConfig, {})) for name in group]
    assert names[:3] == ["q_proj", "k_proj", "v_proj"]
    assert "shared_expert_gate" not in names
