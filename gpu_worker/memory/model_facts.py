"""What the meta model shows of a model: its attention layers, its memory, its linear layers with a common input.

Building and running the meta model takes half a second or more, so the facts are kept in a file. Its name is
a hash of all that they depend on: the config, dtype, versions of torch and Transformers, the file of the model's class,
and the worker's sources. A file that cannot be read, is not this user's, or whose contents do not match its checksum is
ignored. Refusals are not kept. Owns the file; knows nothing of weights.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter, ValidationError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.checkpoint.merged import Groups
from gpu_worker.checkpoint.same_model import differences
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.compatibility.computation import computation_of
from gpu_worker.compatibility.shared_inputs import shared_inputs
from gpu_worker.memory.costs import Costs
from gpu_worker.memory.estimate import estimate
from tandem_contract.files import cache_dir, is_private

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parents[1]
_MOST_BYTES, _MOST_FILES = 4 << 20, 64
# Fields of a config that are tried alone to find which one differs, and fields that a refusal names.
_MOST_TRIALS, _MOST_NAMED = 16, 4
_SUM_BYTES = hashlib.sha256().digest_size * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model before its weights are read."""

    layers: LayerMap
    costs: Costs
    # Linear layers that are merged.
    merged: Groups
    # A hash of what the model computes with given weights (`compatibility.computation`).
    computation: str


def model_facts(config: PreTrainedConfig, *, dtype: torch.dtype, packs: bool, folder: Path | None = None) -> ModelFacts:
    """The facts, from the file of an earlier start if there is one. Raises ModelRefused.

    packs: the model's linear layers will be packed. folder: of the files, by default in the user's cache.
    """
    folder = cache_dir("models") if folder is None else folder
    path = folder / f"{_key(config, dtype, packs)}.json"
    known = _read(path)
    if known is not None:
        log.info("the model is known from an earlier start: %s", path)
        return known
    found = examine(config, dtype=dtype, packs=packs)
    # Without the file the next start takes a little longer.
    with suppress(OSError):
        _write(path, found)
    return found


def examine(config: PreTrainedConfig, *, dtype: torch.dtype, packs: bool) -> ModelFacts:
    """The facts as the meta model shows them. Raises ModelRefused."""
    meta_model = meta_model_of(config, dtype=dtype)
    layers = check_model(meta_model)
    merged = shared_inputs(meta_model)
    costs = estimate(meta_model, layers, dtype=dtype, packs=packs)
    return ModelFacts(layers=layers, costs=costs, merged=merged, computation=computation_of(meta_model, layers))


def check_same_computation(own: PreTrainedConfig, new: PreTrainedConfig, *, dtype: torch.dtype, packs: bool) -> None:
    """Raises ModelRefused, which names the fields, unless both configs compute the same with the same weights."""
    ours, theirs = own.to_dict(), new.to_dict()
    if ours == theirs:
        return
    before, why = model_facts(own, dtype=dtype, packs=packs).computation, "config.json computes something else"
    try:
        if type(own) is type(new) and model_facts(new, dtype=dtype, packs=packs).computation == before:
            return
    except ModelRefused as error:
        why = f"the model of config.json cannot be served, {error}"
    differing = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    trials = differing[:_MOST_TRIALS] if len(differing) > 1 else ()
    guilty = [name for name in trials if not _computes(own, {name: theirs.get(name)}, before, dtype)]
    ours, theirs = ({name: each.get(name) for name in guilty or differing} for each in (ours, theirs))
    raise ModelRefused(
        f"{why}: {'; '.join(list(differences(ours, theirs))[:_MOST_NAMED])}; start the worker with this folder instead"
    )


def _computes(own: PreTrainedConfig, changes: dict[str, Any], computation: str, dtype: torch.dtype) -> bool:
    """Whether the config computes this with these fields changed."""
    if "model_type" in changes:
        return False
    try:
        changed = type(own).from_dict(own.to_dict() | changes)
        return examine(changed, dtype=dtype, packs=False).computation == computation
    except Exception:  # any error of a config class of Transformers, because other fields belong to this one
        return False


def _key(config: PreTrainedConfig, dtype: torch.dtype, packs: bool) -> str:
    facts = {
        "config": config.to_dict(),
        "class": type(config).__qualname__,
        "dtype": str(dtype),
        "packs": packs,
        "versions": [torch.__version__, transformers.__version__, platform.python_version()],
        "model's code": _code_of(config),
        "worker": [[str(path.relative_to(_SOURCES)), _sum(path.read_bytes())] for path in _sources()],
    }
    return _sum(json.dumps(facts, sort_keys=True, default=str).encode())[:32]


def _code_of(config: PreTrainedConfig) -> list[object]:
    """The file of the model's class, its size and time: an installation may be edited within one version."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return []
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    path = getfile(model_class)
    about = Path(path).stat()
    return [path, about.st_size, about.st_mtime_ns]


def _sources() -> list[Path]:
    return sorted(_SOURCES.rglob("*.py"))


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> ModelFacts | None:
    """The facts in a file: its checksum, then JSON. None if it is missing or not as it was written."""
    try:
        if not is_private(path.parent) or not is_private(path) or path.stat().st_size > _MOST_BYTES:
            return None
        data = path.read_bytes()
        if data[:_SUM_BYTES] != _sum(data[_SUM_BYTES:]).encode():
            return None
        return TypeAdapter(ModelFacts).validate_json(data[_SUM_BYTES:])
    except (OSError, ValidationError):
        return None


def _write(path: Path, facts: ModelFacts) -> None:
    """Writes the file under another name first, and removes the oldest if there are too many."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path.parent):
        return
    data = TypeAdapter(ModelFacts).dump_json(facts)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".facts-")
    with os.fdopen(fd, "wb") as file:
        file.write(_sum(data).encode() + data)
    Path(name).replace(path)
    files = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
    for old in files[:-_MOST_FILES]:
        old.unlink(missing_ok=True)
