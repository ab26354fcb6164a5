"""How the ranks of a group share a model: the plan of its class in Transformers, and our strings where it lacks some.

A plan can be wrong without an error: the statistics of a layer with a sharded input are those of a part, for example.
`proven.json` has a hash of each plan that gave the logits of one process, by model type, as `make census ARGS="--ranks
2 --write"` found. What one rank holds and computes is found before a byte of weights is read: Transformers applies the
plan to a copy of the model without data, in a process group that exists in this process alone. Its parameters show what
the rank stores, and its calls of attention which heads reach it. Owns the strings, the hash and the file; and that
process group, which is gone before the real one is made.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from gpu_worker.attention.layers import AttentionLayer, LayerMap
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.checkpoint.loading import own_part
from gpu_worker.compatibility.check_model import meta_model_of
from gpu_worker.compatibility.probe import calls_without_masks
from gpu_worker.failures import first_line
from gpu_worker.memory.costs import pool_tensors
from gpu_worker.memory.model_facts import ModelFacts
from gpu_worker.process.ranks import Ranks
from tandem_contract.plural import numbered

FILE = Path(__file__).with_name("proven.json")
# A rank that keeps more of the weights than this gains nothing worth its collective calls.
_MOST_KEPT = 0.95
_KEYS_AND_VALUES = re.compile(r"(^|\.)(k_proj|v_proj)$")


# By model type, styles by the name of a layer or parameter, with * for a layer's number. Transformers' own plan
# for these models shards experts only; both hold together.
_ADDED: Mapping[str, Mapping[str, str]] = {
    "gpt_oss": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.sinks": "colwise",
        # The sinks have no forward of their own, so their owner's takes them as local tensors.
        "model.layers.*.self_attn": "local_params",
    }
}


def plan_for(model: PreTrainedModel, layers: LayerMap, size: int) -> DistributedConfig:
    """The plan by which `size` ranks share the model with attention layers `layers`. Raises ModelRefused."""
    name = type(model).__name__
    overrides = dict(_ADDED.get(model.config.model_type, {}))
    ep_size = size if overrides else None
    styles = dict(model.tp_plan or {}) | overrides
    if not styles:
        raise ModelRefused(f"{name} has no tensor-parallel plan in Transformers; set ranks to 1")
    projections = [layer for layer, style in styles.items() if style == "colwise" and _KEYS_AND_VALUES.search(layer)]
    if projections:
        _check_heads(name, layers, size)
    if any(kind.num_kv_heads < size for kind in layers.kinds):
        # Each rank computes all KV heads and keeps those that its query heads read.
        overrides |= dict.fromkeys(projections, "replicate")
    return DistributedConfig(tp_size=size, tp_plan=overrides or None, ep_size=ep_size)


def _check_heads(name: str, layers: LayerMap, size: int) -> None:
    """Raises ModelRefused unless every rank's query heads read the same number of KV heads."""
    for kind in layers.kinds:
        if kind.num_heads % size or (kind.num_kv_heads % size and size % kind.num_kv_heads):
            raise ModelRefused(
                f"{name} has {numbered(kind.num_heads, 'query head')} and {kind.num_kv_heads} KV heads, which "
                f"{numbered(size, 'rank')} cannot share evenly; set ranks to a divisor of the query heads that also "
                "divides the KV heads, or is a multiple of them"
            )


def plan_hash(model: PreTrainedModel, plan: DistributedConfig) -> str:
    """A hash of all that says how the model is sharded: its class, its plan, the version of Transformers."""
    styles = dict(model.tp_plan or {}) | (plan.tp_plan if isinstance(plan.tp_plan, dict) else {})
    facts: list[object] = [transformers.__version__, type(model).__name__, sorted(styles.items())]
    if (plan.ep_size or 1) > 1:
        facts.append(sorted((model.ep_plan or {}).items()))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def proven() -> dict[str, str]:
    return dict[str, str](json.loads(FILE.read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a model: what it holds, and the plan by which the model is shared."""

    facts: ModelFacts
    plan: DistributedConfig
    # As `plan.plan_hash` makes it.
    plan_hash: str


def part_of(
    config: PreTrainedConfig,
    whole: ModelFacts,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    packs: bool,
) -> Part:
    """This rank's part of the `whole` model; packs: linear layers will be packed. Raises ModelRefused."""
    with pretended_group(ranks):
        model, plan = sharded_model(config, whole.layers, ranks)
        hashed = plan_hash(model, plan)
        kept, total = _weight_elements(model, config, packs=packs)
        try:
            recorded, _ = calls_without_masks(model)
        except Exception as error:  # any error of the model's own code
            raise ModelRefused(
                f"{type(model).__name__} does not run on {numbered(ranks.size, 'rank')}: {_in_short(error)}; if its KV "
                f"heads are not a multiple of {ranks.size}, set ranks to a divisor of them"
            ) from error
    if kept > _MOST_KEPT * total:
        raise ModelRefused(
            f"the tensor-parallel plan of {type(model).__name__} leaves {kept / total:.0%} of the weights on each of "
            f"{numbered(ranks.size, 'rank')}; set ranks to 1"
        )
    pairs = zip(whole.layers.layers, recorded.calls, strict=True)
    layers = LayerMap(layers=tuple(_local(layer, call.query[1], call.key[1], ranks.rank) for layer, call in pairs))
    # The activations are counted as the whole model's, which is more than a rank has.
    costs = replace(
        whole.costs,
        weights=kept * dtype.itemsize,
        smaller_weights=whole.costs.smaller_weights and (whole.costs.smaller_weights[0], 2 * kept),
        pool=pool_tensors(layers, dtype),
    )
    return Part(facts=replace(whole, layers=layers, costs=costs), plan=plan, plan_hash=hashed)


@contextmanager
def pretended_group(ranks: Ranks) -> Iterator[None]:
    """A process group for the duration, without its other ranks; collective calls of torch's `fake` do nothing."""
    dist.init_process_group("fake", rank=ranks.rank, world_size=ranks.size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_model(
    config: PreTrainedConfig, layers: LayerMap, ranks: Ranks
) -> tuple[PreTrainedModel, DistributedConfig]:
    """The meta model with this rank's parameters, in the group of `pretended_group`, and its plan. Raises ModelRefused.

    layers: the attention layers of the whole model.
    """
    untied = copy.deepcopy(config)
    # Transformers shards before it ties, and a tied head has no name of its own.
    for changed in (untied, untied.get_text_config()):
        changed.tie_word_embeddings = False
    # Torch's grouped matrix product runs on the meta device in bfloat16 alone.
    model = meta_model_of(untied, dtype=torch.bfloat16)
    plan = plan_for(model, layers, ranks.size)
    names = ("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep")
    dense = init_device_mesh("cpu", (1, 1, 1, ranks.size), mesh_dim_names=names[0])
    experts = init_device_mesh("cpu", (1, 1, plan.efsdp_size, plan.ep_size or 1), mesh_dim_names=names[1])
    try:
        shared: Any = type(model).maybe_distribute_model(model, plan, TransformersDeviceMesh(dense, experts))
        return shared, plan
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot be shared by {numbered(ranks.size, 'rank')}: "
            f"{_in_short(error)}; set ranks to 1"
        ) from error


def _weight_elements(model: PreTrainedModel, config: PreTrainedConfig, *, packs: bool) -> tuple[int, int]:
    """Elements of this rank's weights and of all; a tied one is counted once, or twice if it is packed as a copy."""
    is_tied = config.get_text_config().tie_word_embeddings and not packs
    counted_elsewhere = model.get_output_embeddings() if is_tied else None
    modules = [module for module in model.modules() if module is not counted_elsewhere]
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    return sum(own_part(each).numel() for each in parameters), sum(each.numel() for each in parameters)


def _local(layer: AttentionLayer, num_heads: int, num_kv_heads: int, rank: int) -> AttentionLayer:
    """The layer as this rank serves it: its attention gets `num_heads` and `num_kv_heads`."""
    kind = layer.kind
    if num_heads == kind.num_heads or num_kv_heads < kind.num_kv_heads:
        return replace(layer, kind=replace(kind, num_heads=num_heads, num_kv_heads=num_kv_heads))
    # All KV heads are computed, and those are kept that the query heads from `rank * num_heads` on read.
    local = replace(kind, num_heads=num_heads, num_kv_heads=max(1, num_heads // kind.group))
    return replace(layer, first_kv_head=rank * num_heads // kind.group, kind=local)


def _in_short(error: Exception) -> str:
    return re.sub(r"\s+", " ", first_line(error))[:200].rstrip(".")
