"""Compares a plan that no file knows with the whole model: on a tiny model of the class, by the ranks that will serve.

The runner of each rank computes what the self-check does, beside the whole tiny model in the same process. A plan that
gave its logits is kept in a file of the user's cache, so a version of Transformers is tried once. Owns that file and
the sizes of the tiny model.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gpu_worker.backends import runner_of
from gpu_worker.checkpoint.files import ModelRefused, read_files
from gpu_worker.checkpoint.linear import can_pack
from gpu_worker.checkpoint.loading import load_weights
from gpu_worker.compatibility.independence import pin
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.failures import first_line
from gpu_worker.geometry import Geometry
from gpu_worker.memory.model_facts import examine
from gpu_worker.process.ranks import Ranks
from gpu_worker.sharding.plan import Part, part_of
from tandem_contract.files import cache_dir, is_private
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

_HEAD_DIM, _MAX_LENGTH, _VOCAB = 32, 256, 131
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# This many layers are kept as they are: some read each other's cache.
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTrial:
    """A plan that is to be compared when all ranks are there, and this rank's part of the tiny model."""

    config: PreTrainedConfig
    part: Part

    def run(self, ranks: Ranks, least: Callable[[Sequence[int]], list[int]], device: torch.device) -> None:
        """Returns if the plan gives the whole model's logits on every rank, now or before. Raises ModelRefused.

        least: `Together.least`.
        """
        path = cache_dir("plans") / f"{self.part.plan_hash}-{ranks.size}-torch-{torch.__version__}"
        # Another host's cache may not have it.
        if least([path.exists() and is_private(path)])[0]:
            return
        problem = self._compare(device)
        if not least([not problem])[0]:
            raise ModelRefused(
                f"the tensor-parallel plan of {type(self.config).__name__} in Transformers {transformers.__version__} "
                f"does not give the whole model's logits: {problem or 'another rank found it'}; set ranks to 1"
            )
        log.info("the plan of %s gives the whole model's logits in this version", numbered(ranks.size, "rank"))
        if not ranks.local_rank:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)
            except OSError as error:
                log.warning("this cannot be kept in %s: %s; the next start compares again", path, error.strerror)

    def _compare(self, device: torch.device) -> str:
        """What was found wrong; empty if nothing."""
        try:
            with tempfile.TemporaryDirectory(prefix="tandem-plan-") as folder:
                whole = _whole(self.config, Path(folder)).to(device)  # type: ignore[arg-type]
                facts = self.part.facts
                model = load_weights(
                    read_files(Path(folder)),
                    device=device,
                    dtype=torch.float32,
                    merged=facts.merged,
                    shared=self.part.plan,
                )
                geometry = Geometry(
                    page_size=16,
                    num_pages=34,
                    max_rows=2,
                    max_length=_MAX_LENGTH,
                    token_budget=512,
                    chunk_align=32,
                    vocab_size=_VOCAB,
                )
                for one in (whole, model):
                    pin(one, _MAX_LENGTH)
                runner = runner_of(model, facts.layers, geometry, device=device, dtype=torch.float32)
                runner.warm_up()
                check_runner(whole, runner, torch.float32)
        except Exception as error:  # any error of the model's own code
            return first_line(error)
        return ""


def trial_of(config: PreTrainedConfig, plan_hash: str, ranks: Ranks, device: torch.device) -> PlanTrial:
    """The trial of a plan, before the ranks meet. Raises ModelRefused if no tiny model of the class has this plan."""
    try:
        tiny = tiny_config(config, ranks.size)
        packs = can_pack(device, torch.float32)
        whole = examine(tiny, dtype=torch.float32, packs=packs)
        part = part_of(tiny, whole, ranks, dtype=torch.float32, packs=packs)
    except Exception as error:  # any error of the model's own code
        raise ModelRefused(_unknown(config, first_line(error))) from error
    if part.plan_hash != plan_hash:
        raise ModelRefused(_unknown(config, "a tiny model of the class has another plan"))
    return PlanTrial(config=tiny, part=part)


def _unknown(config: PreTrainedConfig, why: str) -> str:
    return (
        f"the tensor-parallel plan of {type(config).__name__} in Transformers {transformers.__version__} was never "
        f"compared with the whole model, and cannot be: {why}; set ranks to 1"
    )


def tiny_config(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """The config with small sizes, the first layer of each kind, and KV heads that `size` ranks share evenly."""
    fields = config.to_dict()
    heads, kv_heads = 2 * size, fields.get("num_key_value_heads")
    sizes: dict[str, Any] = {
        **dict.fromkeys(("num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), heads),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 32 * size),
        **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
        "num_key_value_heads": kv_heads if kv_heads is not None and kv_heads < size else heads,
        "hidden_size": heads * _HEAD_DIM,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCAB,
        "max_position_embeddings": _MAX_LENGTH,
        "sliding_window": 24,
    }
    small = {name: size for name, size in sizes.items() if isinstance(fields.get(name), int)}
    tokens = {name: 1 for name in fields if name.endswith("token_id")}
    return type(config).from_dict(fields | small | tokens | fewer_layers(fields, few=_FEW))


def fewer_layers(fields: Mapping[str, Any], *, few: int = 2, most: int | None = None) -> dict[str, Any]:
    """The fields of a config's layers, for the first layer of each kind and at least two layers.

    few: this many layers are all kept. most: the kinds that are kept. Raises StopIteration without a number of layers.
    """
    name = next(name for name in COUNTS if name in fields)
    count = fields[name]
    lists = {key: value for key, value in fields.items() if isinstance(value, list) and len(value) == count}
    kinds = [repr([value[layer] for value in lists.values()]) for layer in range(count)]
    firsts = list(dict.fromkeys(map(kinds.index, kinds)))[:most]
    others = [layer for layer in range(count) if layer not in firsts]
    kept = sorted(firsts + others[: count if count <= few else max(0, 2 - len(firsts))])
    return {name: len(kept)} | {key: [value[layer] for layer in kept] for key, value in lists.items()}


@torch.no_grad()
def _whole(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """The tiny model, the same on every rank, which is saved in `folder`. Norms differ by element, biases are not 0."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator)
            factor = 1.3 * (tensor.shape[-1] * tensor.shape[-2]) ** -0.25 if tensor.ndim > 1 else 0.2
            tensor.copy_(drawn * factor + (tensor.ndim < 2 and "bias" not in name))
    model.tie_weights()
    # `save_pretrained` of a model writes on the first rank of a host only.
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    config.save_pretrained(folder)
    return model
