"""The tensor-parallel plans that were proven: their models give the logits of one process on two ranks.

A plan can be wrong without an error: the statistics of a layer whose input is sharded are those of a part, for example.
Eager attention on the same ranks would be wrong alike, so the self-check cannot find it. `make census ARGS="--ranks 2
--write"` compares a tiny model of each class with the whole model in one process, and writes the file of this module: a
hash of each plan, by model type. Owns the hash and the file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

FILE = Path(__file__).with_name("proven.json")


def plan_hash(model: PreTrainedModel, plan: DistributedConfig) -> str:
    """A hash of all that says how the model is sharded: its class, its plan, the version of Transformers."""
    styles = dict(model.tp_plan or {}) | (plan.tp_plan if isinstance(plan.tp_plan, dict) else {})
    facts: list[object] = [transformers.__version__, type(model).__name__, sorted(styles.items())]
    if (plan.ep_size or 1) > 1:
        facts.append(sorted((model.ep_plan or {}).items()))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def proven() -> dict[str, str]:
    """Hashes by model type, and by how it was shared where there are several ways."""
    found: dict[str, str] = json.loads(FILE.read_text())
    return found


def write(plans: Mapping[str, str]) -> None:
    """Replaces the file."""
    FILE.write_text(json.dumps(dict(sorted(plans.items())), indent=1) + "\n")
