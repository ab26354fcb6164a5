"""What one rank holds, found without weights; plans that are refused; the process group that only pretends ends."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
)

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.memory.model_facts import ModelFacts, examine
from gpu_worker.process.ranks import Ranks
from gpu_worker.sharding.plan import part_of
from tests.census.shrink import tiny_config

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


def whole_and_parts(config: PreTrainedConfig, size: int = 2) -> tuple[ModelFacts, list[ModelFacts]]:
    """The facts of the whole model and of each rank."""
    whole = examine(config, dtype=torch.float32, packs=False)
    ranks = [Ranks(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
    parts = [part_of(config, whole, each, dtype=torch.float32, packs=False) for each in ranks]
    return whole, [part.facts for part in parts]


def with_kv_heads(number: int) -> LlamaConfig:
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": number}
    return LlamaConfig(**sizes)


def heads(facts: ModelFacts) -> set[tuple[int, int]]:
    return {(layer.kind.num_heads, layer.kind.num_kv_heads) for layer in facts.layers.layers}


@pytest.mark.parametrize(
    "config",
    [
        *(each(**SIZES) for each in (LlamaConfig, Qwen3Config, GemmaConfig, MixtralConfig)),
        tiny_config(GptOssConfig, {}),
    ],
    ids=lambda config: config.model_type,
)
def test_heads_experts_and_the_pool_are_split(config: PreTrainedConfig) -> None:
    whole, parts = whole_and_parts(config)
    assert heads(whole) == {(4, 2)}
    for part in parts:
        assert heads(part) == {(2, 1)}
        assert 2 * part.costs.kv_per_token == whole.costs.kv_per_token
        assert [layer.name for layer in part.layers.layers] == [layer.name for layer in whole.layers.layers]
        assert part.merged == whole.merged
        assert part.costs.weights < 0.6 * whole.costs.weights
    # Norms are whole on each rank, so the parts are together a little more than the model.
    total = sum(part.costs.weights for part in parts)
    assert whole.costs.weights <= total < 1.1 * whole.costs.weights


def test_attention_that_a_plan_leaves_whole_keeps_its_heads_and_its_pool() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    whole, parts = whole_and_parts(Olmo2Config(**sizes))
    for part in parts:
        assert part.layers == whole.layers
        assert part.costs.kv_per_token == whole.costs.kv_per_token
        assert part.costs.weights < whole.costs.weights


def test_a_tied_head_is_counted_once() -> None:
    _, tied = whole_and_parts(LlamaConfig(**SIZES, tie_word_embeddings=True))
    _, untied = whole_and_parts(LlamaConfig(**SIZES, tie_word_embeddings=False))
    head_of_a_rank = 64 // 2 * 32 * torch.float32.itemsize
    for with_one, with_two in zip(tied, untied, strict=True):
        assert with_two.costs.weights - with_one.costs.weights == head_of_a_rank


def test_the_given_config_stays_as_it_is() -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    before = config.to_dict()
    whole_and_parts(config)
    assert config.to_dict() == before


def first_heads(facts: ModelFacts) -> set[int | None]:
    return {layer.first_kv_head for layer in facts.layers.layers}


@pytest.mark.parametrize(("kv_heads", "size", "kept"), [(1, 2, [0, 0]), (2, 4, [0, 0, 1, 1])])
def test_each_of_more_ranks_than_kv_heads_keeps_the_one_that_its_query_heads_read(
    kv_heads: int, size: int, kept: list[int]
) -> None:
    whole, parts = whole_and_parts(with_kv_heads(kv_heads), size)
    assert [heads(part) for part in parts] == [{(4 // size, 1)}] * size
    assert [first_heads(part) for part in parts] == [{head} for head in kept]
    assert all(part.costs.kv_per_token * kv_heads == whole.costs.kv_per_token for part in parts)
    whole, split = whole_and_parts(with_kv_heads(4), size)
    assert [heads(part) for part in split] == [{(4 // size, 4 // size)}] * size
    assert [first_heads(part) for part in split] == [{None}] * size
    assert all(size * part.costs.kv_per_token == whole.costs.kv_per_token for part in split)


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 3), (1, 3)])
def test_heads_that_ranks_cannot_share_evenly_are_refused(kv_heads: int, size: int) -> None:
    config = with_kv_heads(kv_heads)
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM .*; set ranks to "):
        whole_and_parts(config, size)


def test_a_class_without_a_plan_is_refused() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ModelRefused, match=r"GPT2LMHeadModel .*set ranks to 1$"):
        whole_and_parts(config)
