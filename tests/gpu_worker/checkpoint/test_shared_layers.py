"""Which linear layers of a rank become plain ones, and what they hold. What they compute is the census's matter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config

from gpu_worker.checkpoint.folder import WeightFiles
from gpu_worker.checkpoint.linear import is_plain_linear
from gpu_worker.checkpoint.shared_layers import GatheredLinear, SummedLinear, plain_layers
from gpu_worker.compatibility.new_weights import NewWeights, check_targets, replace_weights
from gpu_worker.memory.model_facts import examine
from gpu_worker.process.ranks import Ranks
from gpu_worker.sharding.plan import pretended_group, sharded_model
from tests.gpu_worker.checkpoint.test_replace import SIZES

LAYER = "model.layers.0"


def config_with(**changes: Any) -> PreTrainedConfig:
    # Qwen 2 has biases of queries, keys and values.
    return Qwen2Config(**{**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": False, **changes})


@pytest.fixture(params=[0, 1])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(rank=request.param, size=2, local_rank=request.param, local_size=2)
    with pretended_group(found):
        yield found


def shared(config: PreTrainedConfig, ranks: Ranks) -> PreTrainedModel:
    layers = examine(config, dtype=torch.float32, packs=False).layers
    model, _ = sharded_model(config, layers, ranks)
    return model


def test_every_linear_layer_is_plain_with_a_call_where_ranks_must_meet(ranks: Ranks) -> None:
    model = shared(config_with(), ranks)
    assert plain_layers(model) == 9
    attention, mlp = model.get_submodule(f"{LAYER}.self_attn"), model.get_submodule(f"{LAYER}.mlp")
    for linear, shape in ((attention.q_proj, (8, 16)), (attention.k_proj, (4, 16)), (mlp.up_proj, (12, 16))):
        assert is_plain_linear(linear) and tuple(linear.weight.shape) == shape
        assert not isinstance(linear.weight, DTensor)
    assert tuple(attention.q_proj.bias.shape) == (8,)
    for summed, width in ((attention.o_proj, 8), (mlp.down_proj, 12)):
        assert isinstance(summed, SummedLinear) and is_plain_linear(summed.part)
        assert (summed.in_features, summed.out_features, summed.bias) == (width, 16, None)
    head = model.get_submodule("lm_head")
    assert isinstance(head, GatheredLinear) and is_plain_linear(head.part)
    assert tuple(head.weight.shape) == (20, 16) and head.out_features == 40


def test_the_last_rank_has_less_of_an_odd_vocabulary_and_a_single_kv_head_is_whole(ranks: Ranks) -> None:
    model = shared(config_with(vocab_size=41, num_key_value_heads=1), ranks)
    assert plain_layers(model) == 9
    head, embedding = model.get_submodule("lm_head"), model.get_submodule("model.embed_tokens")
    assert isinstance(head, GatheredLinear) and head.out_features == 41
    for layer in (head, embedding):
        assert tuple(layer.weight.shape) == (21 if ranks.is_leader else 20, 16)
    attention = model.get_submodule(f"{LAYER}.self_attn")
    assert tuple(attention.q_proj.weight.shape) == (8, 16)
    assert is_plain_linear(attention.k_proj) and tuple(attention.k_proj.weight.shape) == (4, 16)


def test_a_group_of_one_call_computes_the_sum_the_bias_once_and_the_gathered_columns() -> None:
    alone = Ranks(rank=0, size=1, local_rank=0, local_size=1)
    with pretended_group(alone):
        world = torch.distributed.group.WORLD
        assert world is not None
        linear, x = nn.Linear(6, 4), torch.randn(1, 3, 6)
        bias = linear.bias.detach()
        part = nn.Linear(6, 4, bias=False)
        part.weight = linear.weight
        with torch.inference_mode():
            assert torch.equal(SummedLinear(part, bias, world)(x), part(x) + bias)


class _Model(nn.Module):
    """Layers as a rank of two has them: a column part, a row part with a bias, whole weights."""

    def __init__(self) -> None:
        super().__init__()
        world = torch.distributed.group.WORLD
        assert world is not None
        self.up, self.norm = nn.Linear(6, 4), nn.LayerNorm(6)
        self.down = SummedLinear(nn.Linear(3, 5, bias=False), torch.zeros(5), world)
        self.head = GatheredLinear(nn.Linear(6, 5), 10, world)


def test_new_weights_go_to_the_ranks_part(ranks: Ranks) -> None:
    model = _Model()
    tensors: dict[str, Tensor] = {
        name: torch.randn(shape)
        for name, shape in {
            "up.weight": (8, 6), "up.bias": (8,), "down.weight": (5, 6), "down.bias": (5,),
            "head.weight": (10, 6), "head.bias": (10,), "norm.weight": (6,), "norm.bias": (6,),
        }.items()
    }  # fmt: skip
    files = WeightFiles(paths=(), tensor_bytes={})
    weights = NewWeights(files=files, tensors=tensors, states=())
    check_targets(model, weights, ranks)
    replace_weights(model, weights, ranks)
    first = ranks.is_leader
    assert torch.equal(model.up.weight, tensors["up.weight"][:4] if first else tensors["up.weight"][4:])
    assert torch.equal(model.up.bias, tensors["up.bias"].chunk(2)[ranks.rank])
    assert torch.equal(model.down.weight, tensors["down.weight"].chunk(2, 1)[ranks.rank])
    assert model.down.bias is not None and torch.equal(model.down.bias, tensors["down.bias"])
    assert torch.equal(model.head.weight, tensors["head.weight"].chunk(2)[ranks.rank])
    assert torch.equal(model.norm.weight, tensors["norm.weight"])
