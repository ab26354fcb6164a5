"""The self-check passes correct models, and finds faults that the other checks cannot."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, MistralConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gpu_worker.attention.flex_kernel import PrefillAttention
from gpu_worker.attention.layers import AttentionPattern, LayerMap
from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.backends import runner_of as make_runner
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.checkpoint.loading import prepare
from gpu_worker.compatibility import self_check
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.compatibility.independence import pin
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.cpu.attention import PrefillKernel
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.step.runner import Runner
from tests.census.hints import HINTS
from tests.census.shrink import tiny_config
from tests.census.trial import geometry_for
from tests.census.weights import randomize
from tests.gpu_worker.compatibility.rope_configs import dynamic

LENGTH = 200


def runner_of(
    config: object,
    layers: LayerMap,
    geometry: Geometry,
    device: torch.device,
    *,
    pinned: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, Runner]:
    register()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomize(model, seed=4)
    model.set_attn_implementation(ATTENTION_NAME)
    model = prepare(model, device=device, dtype=dtype)
    if pinned:
        pin(model, geometry.max_length)
    runner = make_runner(model, layers, geometry, device=device, dtype=dtype)
    runner.warm_up()
    return model, runner


def mistral(device: torch.device, *, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Runner]:
    config = tiny_config(MistralConfig, {})
    return runner_of(config, mapped(config), geometry_for(LENGTH), device, dtype=dtype)


def mapped(config: object) -> LayerMap:
    return check_model(meta_model_of(config, dtype=torch.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_rows": 1},
        {"num_pages": 2},
        {"num_pages": 3},
        {"max_length": 2},
        {"max_length": 5},
        {"max_length": 9},
        {"page_size": 128, "num_pages": 400, "max_length": 4096, "token_budget": 4096},
        {"token_budget": 64, "max_rows": 32},
    ],
)
def test_the_plans_suit_every_geometry(changes: dict[str, int]) -> None:
    geometry = replace(geometry_for(LENGTH), **changes)
    prompts = self_check.make_prompts(geometry)
    tables = RowTables(geometry)
    for plan in self_check.make_plans(prompts, geometry):
        tables.apply(plan)
        tables.check(plan)
        tables.advance(plan)
        pages = [] if plan.started is None else np.concatenate(plan.started.pages).tolist()
        assert all(1 <= page < geometry.num_pages for page in pages)
        cost = plan.decode_rows.size + align_up(int(plan.chunk_counts.sum()), geometry.chunk_align)
        assert cost <= geometry.token_budget


def test_a_correct_runner_passes_and_is_unchanged(device: torch.device) -> None:
    model, runner = mistral(device)
    assert check_runner(model, runner, torch.float32) < 1e-4
    assert model.config._attn_implementation == ATTENTION_NAME
    assert not any(pool.any() for pool in runner.on_device.cache.pools)
    assert not model._forward_hooks


def test_a_missing_window_fails_the_check(device: torch.device) -> None:
    config = tiny_config(MistralConfig, {})
    layers = mapped(config).layers
    wrong = LayerMap(
        layers=tuple(replace(layer, kind=replace(layer.kind, pattern=AttentionPattern())) for layer in layers)
    )
    model, runner = runner_of(config, wrong, geometry_for(LENGTH), device)
    with pytest.raises(ModelRefused, match="the self-check failed: logits differ from eager attention's by"):
        check_runner(model, runner, torch.float32)


def test_a_batch_dependent_table_fails_the_check(device: torch.device) -> None:
    config = dynamic(length=60)
    model, runner = runner_of(config, mapped(config), geometry_for(LENGTH), device, pinned=False)
    with pytest.raises(ModelRefused, match="the self-check failed"):
        check_runner(model, runner, torch.float32)


def test_rounding_that_changes_experts_passes(device: torch.device) -> None:
    """Sixteen layers of experts in bfloat16 turn one rounding into a fifth of the logits."""
    config = tiny_config(GptOssConfig, {"num_hidden_layers": 16, "layer_types": ["sliding_attention"] * 16})
    model, runner = runner_of(config, mapped(config), geometry_for(LENGTH), device, dtype=torch.bfloat16)
    assert 0.05 < check_runner(model, runner, torch.bfloat16) < 0.5


Attention = PrefillAttention | PrefillKernel


def wrong(right: Attention) -> Callable[..., Tensor | None]:
    """Gives the results of other tokens."""

    def run(*args: Tensor) -> Tensor | None:
        out = right(*args)
        if out is not None:
            return out.roll(1, 1)
        # A kernel of a CPU writes into its last argument.
        args[-1].copy_(args[-1].roll(1, 1))
        return None

    return run


def with_layer(kernels: Any, change: Callable[[Attention], object]) -> Any:
    """The kernels of all layers, with one more, made from the last; on a GPU by bucket."""
    if isinstance(kernels, dict):
        return {bucket: with_layer(own, change) for bucket, own in kernels.items()}
    return (*kernels, change(kernels[-1]))


def test_wrong_chunks_in_the_last_layer_fail_the_check(device: torch.device) -> None:
    """Only the last position of a prompt is read from the last layer."""
    model, runner = mistral(device)
    kernels, num_layers = runner.steps.kernels, len(runner.on_device.layers.layers)
    kernels.prefill = with_layer(kernels.prefill, wrong)
    kernels.decode = with_layer(kernels.decode, lambda right: right)
    last = model.model.layers[-1].self_attn
    last.paged_layer = replace(last.paged_layer, kernel_idx=num_layers)
    with pytest.raises(ModelRefused, match="the self-check failed"):
        check_runner(model, runner, torch.float32)


def test_a_model_without_a_separate_base_model_passes(device: torch.device) -> None:
    """Such a model's steps without samples have logits too."""
    config = tiny_config(CONFIG_MAPPING["mllama"], HINTS["mllama"])
    model, runner = runner_of(config, mapped(config), geometry_for(LENGTH), device)
    assert model.base_model is model
    assert check_runner(model, runner, torch.float32) < 1e-4


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.self_attn.k_proj"])
def test_weights_that_are_not_finite_are_named(name: str, device: torch.device) -> None:
    config = tiny_config(MistralConfig, {})
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    # On a CPU the second one is packed, and not a parameter any more.
    model.get_submodule(name).weight.data.view(-1)[3] = torch.nan
    model = prepare(model, device=device, dtype=torch.float32)
    runner = make_runner(model, mapped(config), geometry_for(LENGTH), device=device, dtype=torch.float32)
    runner.warm_up()
    with pytest.raises(ModelRefused, match=rf"{name}\.weight has values that are not finite"):
        check_runner(model, runner, torch.float32)


def test_values_beyond_the_dtype_are_reported(device: torch.device) -> None:
    model, runner = mistral(device, dtype=torch.float16)
    model.model.norm.weight.fill_(60000.0)
    with pytest.raises(ModelRefused, match=r"do not fit float16, try another dtype"):
        check_runner(model, runner, torch.float16)


def test_constant_logits_pass(device: torch.device) -> None:
    model, runner = mistral(device)
    model.model.norm.weight.zero_()
    assert check_runner(model, runner, torch.float32) == 0
