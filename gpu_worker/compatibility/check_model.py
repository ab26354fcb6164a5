"""Checks, before a weight is loaded, whether a model can be served, and reads the parameters of its attention layers.

Owns the `LayerMap` and the reasons for refusing how a model is built. A copy of the model on PyTorch's meta device,
which has shapes and no data, runs one step, and its calls of attention are recorded. Meta tensors cannot branch on
data, so a forward that does so is refused too. Knows nothing of weights or pages, and asks no device.
"""

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.kernel_options import most_group, most_head_dim
from gpu_worker.attention.layers import AttentionKind, AttentionLayer, AttentionPattern, LayerMap
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.checkpoint.loading import without_warning_of_padding
from gpu_worker.compatibility.independence import undecorate
from gpu_worker.compatibility.probe import (
    NUM_TOKENS,
    STEP,
    Call,
    Recorded,
    UnreadableMask,
    attending,
    calls_with_masks,
    calls_without_masks,
    forward,
    place_of,
    read_pattern,
)
from gpu_worker.failures import first_line
from gpu_worker.geometry import MAX_LENGTH
from tandem_contract.plural import numbered

# A tile of 16 keys must fit the kernels' shared memory.
MAX_HEAD_DIM = 512
_OTHER_PAST = "layers keep their past outside attention, as convolutions and state spaces do"
# Arguments that models pass to attention: those that are read, and others that change no score, or that the mask
# expresses more exactly.
_KNOWN_KEYWORDS = (
    *("scaling", "softcap", "s_aux"),
    *("cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "position_ids", "return_dict", "sliding_window", "step", "use_cache"),
)


def default_length(config: PreTrainedConfig) -> int:
    """Positions that the model was trained for, MAX_LENGTH at most. Raises ModelRefused if the config has none."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 2:
        raise ModelRefused("the length limit is unknown: the config has no max_position_embeddings")
    return min(length, MAX_LENGTH)


def length_limit(config: PreTrainedConfig) -> int:
    """The largest max_length: `dynamic` rotary tables extend to a multiple, which changes the results of all texts."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    tables = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
    factors = [table["factor"] for table in tables if table.get("rope_type") == "dynamic" and "factor" in table]
    if wrong := [factor for factor in factors if not (isinstance(factor, (int, float)) and factor >= 1)]:
        raise ModelRefused(f"the factor of rope_parameters is {wrong[0]!r:.80}; it must be a number, at least 1")
    return int(min(default_length(config) * min(factors, default=1), MAX_LENGTH))


def meta_model_of(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model as it would be loaded, on the meta device: parameters have shapes and dtypes. Raises ModelRefused."""
    try:
        with torch.device("meta"):
            # Some configs name a kernel that is not installed and not needed here.
            copied = copy.deepcopy(config)
            meta_model = AutoModelForCausalLM.from_config(copied, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # any error of the model's own code
        raise ModelRefused(f"the model cannot be built from its config: {_in_short(error)}") from error
    if not getattr(meta_model, "_supports_attention_backend", False):
        raise ModelRefused(f"{type(meta_model).__name__} does not support other attention implementations")
    without_warning_of_padding(meta_model)
    return meta_model.eval()


def check_model(meta_model: PreTrainedModel) -> LayerMap:
    """The attention layers of a model, in the order of its forward. Raises ModelRefused."""
    for module in meta_model.modules():
        undecorate(module)
    with in_bfloat16(meta_model):
        recorded = _run(meta_model)
        if not recorded.calls:
            raise ModelRefused("the model does not attend: it never calls the attention interface of Transformers")
        _check_layers(meta_model, recorded)
        masked = _run_with_masks(meta_model)
    names = {module: name for name, module in meta_model.named_modules()}
    if [call.module for call in recorded.calls] != [call.module for call in masked.calls]:
        raise ModelRefused("attention depends on the mask: the model calls other layers with masks than without")
    length = length_limit(meta_model.config)
    patterns: dict[object, AttentionPattern] = {}
    layers: list[AttentionLayer] = []
    for call, with_mask in zip(recorded.calls, masked.calls, strict=True):
        name = names[call.module]
        if any(layer.name == name for layer in layers):
            raise ModelRefused(f"a layer calls attention several times in a step: {name}")
        key = id(with_mask.mask)
        if key not in patterns:
            patterns[key] = _pattern(with_mask, masked, name, length)
        layers.append(AttentionLayer(name=name, kind=_kind(call, name, patterns[key])))
    return LayerMap(layers=tuple(layers))


@contextmanager
def in_bfloat16(meta_model: PreTrainedModel) -> Iterator[None]:
    """Casts the model for the duration: torch's grouped matrix product runs on the meta device in bfloat16 alone."""
    tensors = [tensor for tensor in (*meta_model.parameters(), *meta_model.buffers()) if tensor.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(torch.bfloat16)
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


def _run(meta_model: PreTrainedModel) -> Recorded:
    """The model's calls without masks, as the worker runs it. Raises ModelRefused."""
    try:
        recorded, logits_shape = calls_without_masks(meta_model)
    except Exception as error:  # any error of the model's own code
        raise ModelRefused(_why_it_does_not_run(meta_model, error)) from error
    if logits_shape[:2] != (1, 1):
        raise ModelRefused("the model has no logits_to_keep: it computes logits for every token of a prompt")
    if recorded.convolutions:
        raise ModelRefused(f"{_OTHER_PAST}: {recorded.convolutions[0]}")
    if recorded.numberings:
        raise ModelRefused(f"the model numbers positions by their order in the batch: {recorded.numberings[0]}")
    for call in recorded.calls:
        if call.keywords.get("step") is not STEP:
            raise ModelRefused("arguments do not reach attention: a layer does not pass them on")
        if call.mask is not None:
            raise ModelRefused("the model has its own mask: it adds a term to the scores that only the mask contains")
    return recorded


def _run_with_masks(meta_model: PreTrainedModel) -> Recorded:
    try:
        return calls_with_masks(meta_model)
    except Exception as error:
        if any(frame.name == "create_recurrent_attention_mask" for frame in traceback.extract_tb(error.__traceback__)):
            raise ModelRefused(f"{_OTHER_PAST}: the model makes masks for recurrent layers") from error
        raise ModelRefused(f"masks depend on data: {_place(error)}") from error


def run_eagerly(meta_model: PreTrainedModel) -> None:
    """Runs what the self-check compares with, on this model in bfloat16. Raises ModelRefused."""
    # Transformers passes on a mask of this form and makes none, so that no operator of a mask runs.
    mask = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=meta_model.dtype, device="meta")
    try:
        with attending(meta_model, "eager"):
            forward(meta_model, attention_mask=mask)
    except Exception as error:  # any error of the model's own code
        raise ModelRefused(f"the model's own eager attention does not run: {_place(error)}") from error


def _why_it_does_not_run(meta_model: PreTrainedModel, error: Exception) -> str:
    if isinstance(error, NotImplementedError) or "meta tensor" in str(error) or "Meta tensor" in str(error):
        return f"the forward branches on data: {place_of(_frame(error))}"
    try:
        calls_with_masks(meta_model)
    except Exception:  # the model runs neither way; the first error is reported
        return f"the model does not run on packed tokens: {_place(error)}"
    return f"the mask is read outside attention: {_place(error)}"


def _place(error: Exception) -> str:
    """The error and the line of the model's code that raised it."""
    return f"{_in_short(error)} ({place_of(_frame(error))})"


def _frame(error: Exception) -> traceback.FrameSummary:
    frames = traceback.extract_tb(error.__traceback__)
    return ([frame for frame in frames if "modeling_" in frame.filename] or frames)[-1]


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:200]}"


def _check_layers(meta_model: PreTrainedModel, recorded: Recorded) -> None:
    """Raises ModelRefused if a decoder layer does not attend: its past is kept in a way that is not served."""
    calling = {call.module for call in recorded.calls}
    for name, modules in meta_model.named_modules():
        if not isinstance(modules, nn.ModuleList) or len(modules) < 2:
            continue
        attends = [any(module in calling for module in layer.modules()) for layer in modules]
        classes = {type(layer) for layer in modules}
        if any(attends) and not all(attends) and len(classes) == 1:
            idx = attends.index(False)
            inside = ", ".join(sorted({type(child).__name__ for child in modules[idx].children()}))
            raise ModelRefused(f"{_OTHER_PAST}: {name}.{idx} has {inside}")


def _pattern(call: Call, masked: Recorded, name: str, length: int) -> AttentionPattern:
    if call.mask is None:
        raise ModelRefused(f"a layer attends without a mask: {name} sees every token of a batch")
    function = next((function for mask, function in masked.masks if mask is call.mask), None)
    if function is None:
        raise ModelRefused(f"the model has its own mask: {name} changes the mask that Transformers makes")
    try:
        return read_pattern(function, num_heads=call.query[1], length=length)
    except UnreadableMask as error:
        raise ModelRefused(f"attention is neither causal nor a sliding window: in {name}, {error}") from error


def _kind(call: Call, name: str, pattern: AttentionPattern) -> AttentionKind:
    batch, heads, num_queries, key_dim = call.query
    _, kv_heads, num_keys, _ = call.key
    value_dim = call.value[3]
    if batch != 1 or num_queries != NUM_TOKENS or num_keys != NUM_TOKENS or call.value[:3] != call.key[:3]:
        raise ModelRefused(
            f"a layer attends to other tokens than those of the step: {name} has queries {list(call.query)}, keys "
            f"{list(call.key)}, values {list(call.value)} for {NUM_TOKENS} tokens"
        )
    if heads % kv_heads:
        raise ModelRefused(f"query heads are not a multiple of KV heads: {name} has {heads} and {kv_heads}")
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        raise ModelRefused(
            f"heads have more than {MAX_HEAD_DIM} dimensions: {name} has keys of {key_dim} and values of {value_dim}"
        )
    for keyword, value in call.keywords.items():
        if keyword not in _KNOWN_KEYWORDS and value is not None:
            raise ModelRefused(f"attention has an unknown argument: {name} passes {keyword}")
    sinks = call.keywords.get("s_aux")
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != (heads,)):
        raise ModelRefused(f"learned sinks have an unknown form: {name} passes {getattr(sinks, 'shape', sinks)}")
    scale, softcap = call.keywords.get("scaling"), call.keywords.get("softcap")
    return AttentionKind(
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=float(key_dim**-0.5 if scale is None else scale),
        softcap=None if softcap is None else float(softcap),
        pattern=AttentionPattern(window=pattern.window, has_learned_sinks=sinks is not None),
    )


def check_cuda_shapes(layers: LayerMap, dtype: torch.dtype) -> None:
    """Raises ModelRefused for a shape that no line of the table of kernel options covers, so that it would not run."""
    name, widest = str(dtype).removeprefix("torch."), most_head_dim(dtype)
    for layer in layers.layers:
        kind = layer.kind
        if kind.head_dim > widest:
            raise ModelRefused(
                f"{layer.name} has heads of {numbered(kind.head_dim, 'dimension')}; the decode kernel for CUDA takes "
                f"at most {widest} in {name}; dtype bfloat16 or device cpu has no such limit"
            )
        if kind.group > (limit := most_group(dtype, kind.head_dim)):
            raise ModelRefused(
                f"{layer.name} has {numbered(kind.group, 'query head')} per KV head; the decode kernel for CUDA takes "
                f"at most {limit} of {numbered(kind.head_dim, 'dimension')} in {name}; device cpu has no such limit"
            )
