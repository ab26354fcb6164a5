"""The families that must be served, in the trial of model coverage: prefill, chunks, decode, mixed steps against eager.

Their kernels have one head geometry and are shared: full attention, windows, and both with soft-capping and with sinks.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_worker.compatibility.check_model import default_length, length_limit
from tests.census.case import describe, serve
from tests.census.population import population
from tests.census.reference import Reference, relative_error
from tests.census.shrink import HEAD_DIM, MAX_LENGTH, tiny_config
from tests.census.weights import randomize
from tests.gpu_worker.compatibility.rope_configs import dynamic, phi3

FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "full attention"),
    "qwen2": ({}, "sliding windows and full attention"),
    "qwen3": ({"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, "full attention"),
    "gemma2": ({"query_pre_attn_scalar": HEAD_DIM}, "sliding windows and full attention, soft-capping"),
    "gemma3_text": ({"query_pre_attn_scalar": HEAD_DIM}, "sliding windows and full attention"),
    "mistral": ({}, "sliding windows"),
    "phi3": ({"sliding_window": None}, "full attention"),
    "olmo2": ({}, "full attention"),
    "qwen3_moe": ({"use_sliding_window": False, "sliding_window": None}, "full attention"),
    "gpt_oss": ({}, "sliding windows and full attention, sinks"),
}


_LONG = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in ("llama", "gpt_oss")]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", *_LONG])
def test_every_family_matches_eager_attention(family: str, device: torch.device) -> None:
    hint, attention = FAMILIES[family]
    member, *_ = population(family)
    layers, _ = serve(tiny_config(member.config_class, hint), device, torch.float32)
    assert describe(layers) == attention


@pytest.mark.parametrize(
    ("config", "max_length"),
    [
        pytest.param(phi3(threshold=128), 128, id="short table"),
        pytest.param(phi3(threshold=64), MAX_LENGTH, id="long table, texts on both sides"),
        pytest.param(phi3(threshold=32), MAX_LENGTH, id="long table, texts beyond"),
        pytest.param(dynamic(length=128), 128, id="as made"),
        pytest.param(dynamic(length=60), 200, id="stretched, texts on both sides"),
    ],
)
def test_pinned_tables_match_eager_attention(config: Any, max_length: int, device: torch.device) -> None:
    serve(config, device, torch.float32, max_length)


@pytest.mark.parametrize("length", [60, 128])
def test_a_dynamic_table_may_be_stretched(length: int) -> None:
    config = dynamic(length=length)
    assert (default_length(config), length_limit(config)) == (length, 4 * length)


@pytest.mark.parametrize(
    ("config", "lengths"), [(phi3(threshold=64), (64, MAX_LENGTH)), (dynamic(length=60), (60, 200))]
)
def test_pinned_tables_differ_from_the_default_ones(config: Any, lengths: tuple[int, int]) -> None:
    """Otherwise the tests above would prove nothing."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model, seed=5)
    one, other = (Reference(model, max_length=length).truth(list(range(2, 42)))[0] for length in lengths)
    assert relative_error(one.hidden, other.hidden) > 1e-2
