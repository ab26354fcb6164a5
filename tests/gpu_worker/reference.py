"""The reference for the worker: Transformers' eager forward, with float64 kept float64.

Owns nothing of the worker and imports nothing from it. Eager casts to float32 in softmax, norms, routers and the rotary
table; here those casts are lifted in every family, so that the error of a forward in another dtype can be measured
instead of guessed.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T) v in the inputs' dtype. query [H, q, D], key and value [K, k, D], visible bool [q, k]; sinks [H]
    are an additional column of scores without a value."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : key.shape[1]] @ value


NARROWER = (torch.float32, torch.bfloat16, torch.float16)


class Float64Kept(TorchFunctionMode):
    """Turns casts to float32 into casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wider = {torch.float32: torch.float64}
        args = tuple(wider.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        kwargs = {
            name: wider.get(arg, arg) if isinstance(arg, torch.dtype) else arg for name, arg in (kwargs or {}).items()
        }
        out = func(*args, **kwargs)
        # Buffers that a model keeps in float32, like its rotary frequencies, stay so until they are used.
        computed = isinstance(out, Tensor) and getattr(func, "__name__", "") not in ("__get__", "__getitem__")
        assert not computed or out.dtype not in NARROWER, f"{func} computed in {out.dtype}"
        return out


def eager_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model with random weights and eager attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Norm weights of 1 would hide a missing norm.
                parameter.uniform_(0.5, 1.5)
            elif "sinks" in name:
                # Sinks as large as scores, so that missing ones are noticed.
                parameter.normal_(1.0, 1.0)
    return model.eval()


def float64_model(model: PreTrainedModel) -> PreTrainedModel:
    """An eager model with `model`'s weights that computes in float64 throughout."""
    # Grouped matrix products have no float64; "eager" computes experts one by one.
    experts = {"experts_implementation": "eager"} if "Experts" in str(model) else {}
    meta_model = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation="eager", dtype=torch.float64, **experts
    )
    meta_model.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    return meta_model.eval()


def visible(num_tokens: int, window: int | None, sink_tokens: int = 0) -> Tensor:
    """bool [q, k]: each query sees the last `window` positions, its own included, and the first `sink_tokens` ones."""
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
    near = key > query - (window or num_tokens)
    return (key <= query) & (near | (key < sink_tokens))


def _masks(model: PreTrainedModel, num_tokens: int, bound: tuple[int, int]) -> Tensor | dict[str, Tensor]:
    """Additive masks [1, 1, q, k] in which full-attention layers see `bound`: a window and sink tokens."""
    weight = model.get_input_embeddings().weight

    def additive(seen: Tensor) -> Tensor:
        hidden = torch.zeros(1, 1, *seen.shape, dtype=weight.dtype)
        return hidden.masked_fill(~seen, torch.finfo(weight.dtype).min).to(weight.device)

    bounded = additive(visible(num_tokens, *bound))
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return bounded
    return {
        "full_attention": bounded,
        "sliding_attention": additive(visible(num_tokens, model.config.sliding_window)),
    }


@torch.inference_mode()
def hidden_and_logits(
    model: PreTrainedModel, tokens: list[int], bound: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Last hidden states [n, hidden] and logits [n, vocabulary] of one whole sequence, as float64 on the CPU.

    bound: window and sink tokens for full-attention layers. Logits are those of the head, before later changes by the
    model (Gemma 2 caps them), which keep their order."""
    weight = model.get_input_embeddings().weight
    ids = torch.tensor([tokens], device=weight.device)
    masks = None if bound is None else _masks(model, len(tokens), bound)

    with Float64Kept() if weight.dtype == torch.float64 else nullcontext():
        hidden = model.base_model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    return hidden[0].double().cpu(), logits[0].double().cpu()
