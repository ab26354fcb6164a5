"""How the ranks of a group share a model: the plan of its class in Transformers, and our strings where it lacks some.

Two things are added to a class's own plan. If the model has fewer KV heads than ranks, every rank computes all of them
and keeps those that its query heads read. And gpt-oss, whose plan in Transformers shards its experts only, also shards
its attention.

A plan can be wrong without an error: the statistics of a layer whose input is sharded are those of a part, for example.
Eager attention on the same ranks would be wrong alike, so the self-check cannot find it. `make census ARGS="--ranks 2
--write"` compares a tiny model of each class with the whole model in one process, and writes `proven.json`: a hash of
each plan that gave the logits of one process, by model type. Owns the strings, the hash and the file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelRefused
from tandem_contract.plural import numbered

FILE = Path(__file__).with_name("proven.json")
_KEYS_AND_VALUES = re.compile(r"(^|\.)(k_proj|v_proj)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Added:
    """Styles by the name of a layer or parameter, with * for a layer's number; whether the ranks share the experts."""

    styles: Mapping[str, str] = field(default_factory=dict[str, str])
    shares_experts: bool = False


# By model type.
_ADDED = {
    "gpt_oss": _Added(
        styles={
            "model.layers.*.self_attn.q_proj": "colwise",
            "model.layers.*.self_attn.k_proj": "colwise",
            "model.layers.*.self_attn.v_proj": "colwise",
            "model.layers.*.self_attn.o_proj": "rowwise",
            "model.layers.*.self_attn.sinks": "colwise",
            # The sinks have no forward of their own, so their owner's takes them as local tensors.
            "model.layers.*.self_attn": "local_params",
        },
        shares_experts=True,
    )
}


def plan_for(model: PreTrainedModel, layers: LayerMap, size: int) -> DistributedConfig:
    """The plan by which `size` ranks share the model, whose attention layers are `layers`. Raises ModelRefused."""
    name = type(model).__name__
    added = _ADDED.get(model.config.model_type, _Added())
    styles = dict(model.tp_plan or {}) | dict(added.styles)
    if not styles:
        raise ModelRefused(f"{name} has no tensor-parallel plan in Transformers; set ranks to 1")
    overrides = dict(added.styles)
    projections = [layer for layer, style in styles.items() if style == "colwise" and _KEYS_AND_VALUES.search(layer)]
    if projections:
        _check_heads(name, layers, size)
    if any(kind.num_kv_heads < size for kind in layers.kinds):
        overrides |= dict.fromkeys(projections, "replicate")
    return DistributedConfig(
        tp_size=size,
        tp_plan=overrides or None,
        ep_size=size if added.shares_experts else None,
    )


def _check_heads(name: str, layers: LayerMap, size: int) -> None:
    """Raises ModelRefused unless every rank's query heads read the same number of KV heads."""
    for kind in layers.kinds:
        if kind.num_heads % size or (kind.num_kv_heads % size and size % kind.num_kv_heads):
            raise ModelRefused(
                f"{name} has {numbered(kind.num_heads, 'query head')} and {kind.num_kv_heads} KV heads, "
                f"which {numbered(size, 'rank')} cannot "
                "share evenly; set ranks to a divisor of the query heads that also divides the KV heads, or is a "
                "multiple of them"
            )


def plan_hash(model: PreTrainedModel, plan: DistributedConfig) -> str:
    """A hash of all that says how the model is sharded: its class, its plan, the version of Transformers."""
    styles = dict(model.tp_plan or {}) | (plan.tp_plan if isinstance(plan.tp_plan, dict) else {})
    facts: list[object] = [transformers.__version__, type(model).__name__, sorted(styles.items())]
    if (plan.ep_size or 1) > 1:
        facts.append(sorted((model.ep_plan or {}).items()))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def proven() -> dict[str, str]:
    """Hashes by model type, and by how it was shared where there are several ways."""
    return dict[str, str](json.loads(FILE.read_text()))
