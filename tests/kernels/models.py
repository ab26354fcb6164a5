"""The models that kernels are checked for, and the sizes that the worker chooses for them on a card.

Owns the configurations, as the checkpoints have them. Weights are never needed: layers and memory figures come from the
model on PyTorch's meta device, as at the worker's start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoConfig, GptOssConfig, PreTrainedConfig

from gpu_worker.attention.layers import LayerMap
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.memory.costs import estimate
from gpu_worker.memory.sizing import DoesNotFit, Machine, Sizes, choose_sizes
from gpu_worker.settings import WorkerSettings
from tests.kernels.cards import GIB, Card
from tests.rigs.true_shapes import TRUE_SHAPES

_HOST_MEMORY = 256 * GIB


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        vocab_size=201_088,
        max_position_embeddings=131_072,
    )


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    **{name: partial(AutoConfig.for_model, family, **fields) for name, (family, fields) in TRUE_SHAPES.items()},
    "gpt-oss-20b": _gpt_oss,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A model on a card."""

    layers: LayerMap
    sizes: Sizes
    num_layers: int


def fitted(name: str, card: Card, dtype: torch.dtype) -> Fitted:
    """The model's layers and sizes by the worker's defaults.

    If the weights do not fit the card, the model has half of its layers, as often as needed: its kernels do not change.
    """
    config = MODELS[name]()
    while True:
        meta_model = meta_model_of(config, dtype=dtype)
        layers = check_model(meta_model)
        costs = estimate(meta_model, layers, dtype=dtype, packs=False)
        machine = Machine(place="cuda:0", free=card.free_memory, free_host=_HOST_MEMORY)
        try:
            sizes = choose_sizes(WorkerSettings(device="cuda"), costs, machine, layers.reach)
        except DoesNotFit:
            config.num_hidden_layers //= 2
            if config.num_hidden_layers < 2:
                raise
            config.layer_types = getattr(config, "layer_types", None) and config.layer_types[: config.num_hidden_layers]
            continue
        return Fitted(layers=layers.within(sizes.geometry.max_length), sizes=sizes, num_layers=config.num_hidden_layers)
