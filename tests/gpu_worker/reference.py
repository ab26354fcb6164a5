"""The truth that the worker is measured against: Transformers' eager forward, with float64 kept float64.

Owns nothing of the worker and imports nothing from it. Eager casts to float32 in softmax, RMSNorm and the rotary table;
here those casts are lifted, so that the error of a float32 or bfloat16 forward can be measured instead of guessed.
"""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

FLOAT64_ATTENTION = "float64_reference"


def plain_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(q k^T) v in the inputs' dtype. query [H, q, D], key and value [K, k, D], visible bool [q, k]."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    length = query.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return plain_attention(query[0], key[0], value[0], causal, scaling).transpose(0, 1)[None], None


def _rms_norm(module: nn.Module, hidden: Tensor) -> Tensor:
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))


def _rotary(module: nn.Module, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq.double()
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling


def eager_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model with random weights and eager attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Weights of one would hide a norm that is left out.
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def float64_model(model: PreTrainedModel) -> PreTrainedModel:
    """`model`'s weights, as they are, in a forward that computes in float64 throughout."""
    AttentionInterface.register(FLOAT64_ATTENTION, _attention)
    twin = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation=FLOAT64_ATTENTION, dtype=torch.float64
    )
    twin.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_rms_norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = functools.partial(_rotary, module)
    return twin.eval()


@torch.inference_mode()
def hidden_and_logits(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Last hidden states [n, hidden] and logits [n, vocabulary] of one whole sequence, as float64 on the CPU."""
    device = model.get_input_embeddings().weight.device
    hidden = model.base_model(input_ids=torch.tensor([tokens], device=device), use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    return hidden[0].double().cpu(), logits[0].double().cpu()
