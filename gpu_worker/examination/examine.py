"""Whether a model can be served, and what each of its attention layers wants, before a weight is loaded.

Owns what is refused for the way a model is built, and the `LayerMap`. Nothing is asked by name of the family: a twin of
the model on the meta device, which has shapes and no data, runs one step, and what it asks of attention is read. Meta
tensors cannot branch on data, so a forward that does is refused here too. Knows nothing of weights, pages or kernels.
"""

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.layers import AttentionKind, AttentionLayer, LayerMap, Visibility
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.examination.probe import STEP, Call, Heard, calls_with_masks, calls_without_masks, place_of
from gpu_worker.examination.rope import undecorate
from gpu_worker.examination.visibility import UnreadableMask, read_visibility

# A tile of 16 keys must fit the kernels' shared memory.
MAX_HEAD_DIM = 512
_OTHER_PAST = "layers whose past is not in attention, such as convolutions and state spaces"
# Tokens of the twin's step; no model has a dimension of this size.
_NUM_TOKENS = 13
# What models hand through to attention that changes no score, or that the mask says better.
_HARMLESS_KEYWORDS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "scaling",
        "sliding_window",
        "step",
        "use_cache",
    }
)
_READ_KEYWORDS = frozenset({"softcap", "s_aux"})


def default_length(config: PreTrainedConfig) -> int:
    """Positions that the model was made for. Raises ModelRefused where it does not say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 2:
        raise ModelRefused("no length limit: the config has no max_position_embeddings")
    return length


def length_limit(config: PreTrainedConfig) -> int:
    """Positions that it can be served with: `dynamic` rotary tables stretch to a multiple, at a price for all texts."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    tables = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
    factors = [float(table["factor"]) for table in tables if table.get("rope_type") == "dynamic" and "factor" in table]
    return int(default_length(config) * min(factors, default=1.0))


def vocab_size_of(config: PreTrainedConfig) -> int:
    """Tokens that the model knows."""
    return int(config.get_text_config().vocab_size)


def twin_of(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model as it would be loaded, without data: parameters have shapes and dtypes. Raises ModelRefused."""
    try:
        with torch.device("meta"):
            # Some configs name a kernel that is not installed; which one matters to nobody here.
            own = copy.deepcopy(config)
            twin = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # whatever a model's own code does with this config
        raise ModelRefused(f"the model cannot be built from its config: {_first_line(error)}") from error
    if not getattr(twin, "_supports_attention_backend", False):
        raise ModelRefused(f"{type(twin).__name__} does not support attention of others: Transformers declares it so")
    return twin.eval()


def examine(twin: PreTrainedModel) -> LayerMap:
    """The attention layers of a model, in the order of its forward. Raises ModelRefused."""
    for module in twin.modules():
        undecorate(module)
    with in_bfloat16(twin):
        heard = _run(twin)
        if not heard.calls:
            raise ModelRefused("no attention: the model never calls the attention interface")
        _check_layers(twin, heard)
        masked = _run_with_masks(twin)
    names = {module: name for name, module in twin.named_modules()}
    if [call.module for call in heard.calls] != [call.module for call in masked.calls]:
        raise ModelRefused("attention that depends on the mask: with masks the model calls other layers than without")
    length = length_limit(twin.config)
    known: dict[object, Visibility] = {}
    layers: list[AttentionLayer] = []
    for call, with_mask in zip(heard.calls, masked.calls, strict=True):
        name = names[call.module]
        if any(layer.name == name for layer in layers):
            raise ModelRefused(f"a layer that attends several times in a step: {name}")
        key = id(with_mask.mask)
        if key not in known:
            known[key] = _visibility(with_mask, masked, name, length)
        layers.append(AttentionLayer(name=name, kind=_kind(call, name, known[key])))
    return LayerMap(layers=tuple(layers))


@contextmanager
def in_bfloat16(twin: PreTrainedModel) -> Iterator[None]:
    """The one dtype in which torch's grouped matrix product has shapes without data."""
    tensors = [tensor for tensor in (*twin.parameters(), *twin.buffers()) if tensor.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(torch.bfloat16)
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


def _run(twin: PreTrainedModel) -> Heard:
    """What the twin asks for without masks, as the worker runs it."""
    try:
        heard, logits_shape = calls_without_masks(twin, _NUM_TOKENS)
    except Exception as error:  # whatever a model's own code does without data
        raise ModelRefused(_why_it_does_not_run(twin, error)) from error
    if logits_shape[:2] != (1, 1):
        raise ModelRefused("no logits_to_keep: the model computes logits for every token of a prompt")
    if heard.convolutions:
        raise ModelRefused(f"{_OTHER_PAST}: {heard.convolutions[0]}")
    if heard.numberings:
        raise ModelRefused(f"positions taken from the order of a batch: {heard.numberings[0]}")
    for call in heard.calls:
        if call.keywords.get("step") is not STEP:
            raise ModelRefused("arguments that do not reach attention: a layer does not hand them on")
        if call.mask is not None:
            raise ModelRefused("a mask of its own: a layer adds something to the scores that only the mask carries")
    return heard


def _run_with_masks(twin: PreTrainedModel) -> Heard:
    try:
        return calls_with_masks(twin, _NUM_TOKENS)
    except Exception as error:
        if any(frame.name == "create_recurrent_attention_mask" for frame in traceback.extract_tb(error.__traceback__)):
            raise ModelRefused(f"{_OTHER_PAST}: the model makes masks for recurrent layers") from error
        raise ModelRefused(f"masks that follow from data: {_place(error)}") from error


def _why_it_does_not_run(twin: PreTrainedModel, error: Exception) -> str:
    if isinstance(error, NotImplementedError) or "meta tensor" in str(error) or "Meta tensor" in str(error):
        return f"a forward that branches on data: {place_of(_frame(error))}"
    try:
        calls_with_masks(twin, _NUM_TOKENS)
    except Exception:  # neither way; what was met first is told
        return f"the model does not run on packed tokens: {_place(error)}"
    return f"the mask is read outside attention: {_place(error)}"


def _place(error: Exception) -> str:
    """The error and the line of the model's code that it came from."""
    return f"{_first_line(error)} ({place_of(_frame(error))})"


def _frame(error: Exception) -> traceback.FrameSummary:
    frames = traceback.extract_tb(error.__traceback__)
    return ([frame for frame in frames if "modeling_" in frame.filename] or frames)[-1]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0].strip()[:200]}"


def _check_layers(twin: PreTrainedModel, heard: Heard) -> None:
    """Every decoder layer attends: one that does not keeps its past in a way that is not served."""
    calling = {call.module for call in heard.calls}
    for name, modules in twin.named_modules():
        if not isinstance(modules, nn.ModuleList) or len(modules) < 2:
            continue
        attends = [any(module in calling for module in layer.modules()) for layer in modules]
        classes = {type(layer) for layer in modules}
        if any(attends) and not all(attends) and len(classes) == 1:
            idx = attends.index(False)
            inside = ", ".join(sorted({type(child).__name__ for child in modules[idx].children()}))
            raise ModelRefused(f"{_OTHER_PAST}: {name}.{idx} has {inside}")


def _visibility(call: Call, masked: Heard, name: str, length: int) -> Visibility:
    if call.mask is None:
        raise ModelRefused(f"attention without a mask: {name} sees every token of a batch")
    function = masked.mask_function(call.mask)
    if function is None:
        raise ModelRefused(f"a mask of its own: {name} changes the mask that Transformers makes")
    try:
        return read_visibility(function, num_heads=call.query[1], length=length)
    except UnreadableMask as error:
        raise ModelRefused(f"attention that is neither causal nor a sliding window: in {name}, {error}") from error


def _kind(call: Call, name: str, visibility: Visibility) -> AttentionKind:
    batch, heads, num_queries, key_dim = call.query
    _, kv_heads, num_keys, _ = call.key
    value_dim = call.value[3]
    if batch != 1 or num_queries != _NUM_TOKENS or num_keys != _NUM_TOKENS or call.value[:3] != call.key[:3]:
        raise ModelRefused(
            f"attention over other tokens than the step's: {name} has queries {list(call.query)}, keys "
            f"{list(call.key)}, values {list(call.value)} for {_NUM_TOKENS} tokens"
        )
    if heads % kv_heads:
        raise ModelRefused(f"heads that cannot be grouped: {name} has {heads} query heads for {kv_heads} KV heads")
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        raise ModelRefused(
            f"heads larger than {MAX_HEAD_DIM}: {name} has keys of {key_dim} and values of {value_dim} dimensions"
        )
    for keyword, value in call.keywords.items():
        if keyword not in _HARMLESS_KEYWORDS | _READ_KEYWORDS and value is not None:
            raise ModelRefused(f"an argument to attention that is not known here: {name} passes {keyword}")
    sinks = call.keywords.get("s_aux")
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != (heads,)):
        raise ModelRefused(f"sinks of an unknown form: {name} passes {getattr(sinks, 'shape', sinks)}")
    scale, softcap = call.keywords.get("scaling"), call.keywords.get("softcap")
    return AttentionKind(
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=float(key_dim**-0.5 if scale is None else scale),
        softcap=None if softcap is None else float(softcap),
        visibility=Visibility(window=visibility.window, has_sinks=sinks is not None),
    )
