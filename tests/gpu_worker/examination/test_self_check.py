"""The self-check passes what is served rightly, and finds what the examination could not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from gpu_worker.attention.layers import LayerMap, Visibility
from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.checkpoint.model import prepare
from gpu_worker.examination import self_check
from gpu_worker.examination.examine import examine, twin_of
from gpu_worker.examination.rope import pin
from gpu_worker.examination.self_check import check_runner
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.runner import Runner
from gpu_worker.slots import RowTables
from tests.census.shrink import tiny_config
from tests.census.trial import geometry_for
from tests.census.weights import randomize
from tests.gpu_worker.examination.rope_configs import dynamic

LENGTH = 200


def runner_of(
    config: object, layers: LayerMap, geometry: Geometry, device: torch.device, *, pinned: bool = True
) -> tuple[PreTrainedModel, Runner]:
    register()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed=4)
    model.set_attn_implementation(ATTENTION_NAME)
    model = prepare(model, device=device, dtype=torch.float32)
    if pinned:
        pin(model, geometry.max_length)
    runner = Runner(model, layers, geometry, device=device, dtype=torch.float32)
    runner.warm_up()
    return model, runner


def mapped(config: object) -> LayerMap:
    return examine(twin_of(config, dtype=torch.float32))


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


def test_passes_and_leaves_no_trace(device: torch.device) -> None:
    config = tiny_config(MistralConfig, {})
    model, runner = runner_of(config, mapped(config), geometry_for(LENGTH), device)
    assert check_runner(model, runner, torch.float32) < 1e-4
    assert model.config._attn_implementation == ATTENTION_NAME
    assert not any(pool.any() for pool in (*runner.cache.keys, *runner.cache.values))
    assert not model._forward_hooks


def test_finds_a_window_that_kernels_do_not_have(device: torch.device) -> None:
    config = tiny_config(MistralConfig, {})
    layers = mapped(config).layers
    wrong = LayerMap(
        layers=tuple(replace(layer, kind=replace(layer.kind, visibility=Visibility())) for layer in layers)
    )
    model, runner = runner_of(config, wrong, geometry_for(LENGTH), device)
    with pytest.raises(ModelRefused, match="the self-check failed: logits differ from eager attention's by"):
        check_runner(model, runner, torch.float32)


def test_finds_a_table_that_moves_with_the_batch(device: torch.device) -> None:
    config = dynamic(length=60)
    model, runner = runner_of(config, mapped(config), geometry_for(LENGTH), device, pinned=False)
    with pytest.raises(ModelRefused, match="the self-check failed"):
        check_runner(model, runner, torch.float32)
