"""What the meta model shows of a model, kept in a file, and whether two configs compute the same.

Building and running the meta model takes half a second or more, so the facts are kept in a file, with a hash of all
that they depend on as its name. A file that cannot be read, is not this user's, or does not match its checksum is
ignored. Refusals are not kept.

The hash of a computation covers every operator, with its numbers and the tensors that it joins, of a step and of the
model's own eager attention, which the self-check reads; the attention layers; the names and shapes of weights; the
tables that the model makes itself; and the lengths that it is served with. So a field of config.json changes the hash
if and only if it changes what is computed or checked, without a list of fields. Which weights are tied is left out:
tied ones are weights with equal values. Knows nothing of weights.
"""

import hashlib
import json
import logging
import platform
from collections import Counter
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelRefused, differences
from gpu_worker.checkpoint.folder import by_kind
from gpu_worker.checkpoint.linear import Groups
from gpu_worker.compatibility.check_model import (
    check_model,
    default_length,
    in_bfloat16,
    length_limit,
    meta_model_of,
    run_eagerly,
)
from gpu_worker.compatibility.independence import pin
from gpu_worker.compatibility.probe import calls_without_masks
from gpu_worker.memory.costs import Costs, estimate
from tandem_contract import private_file
from tandem_contract.files import cache_dir, is_private

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parents[1]
_MOST_BYTES, _MOST_FILES = 4 << 20, 64
# Fields of a config that are tried alone to find which one differs, and fields that a refusal names.
_MOST_TRIALS, _MOST_NAMED = 16, 4
_SUM_BYTES = hashlib.sha256().digest_size * 2
# A constant of a model's code; larger tensors are weights or tables.
_MOST_VALUES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model before its weights are read."""

    layers: LayerMap
    costs: Costs
    # Linear layers that are merged.
    merged: Groups
    # A hash of what the model computes with given weights.
    computation: str


def model_facts(config: PreTrainedConfig, *, dtype: torch.dtype, packs: bool, folder: Path | None = None) -> ModelFacts:
    """The facts, from the file of an earlier start if there is one. Raises ModelRefused.

    packs: the model's linear layers will be packed. folder: of the files, by default in the user's cache.
    """
    folder = cache_dir("models") if folder is None else folder
    path = folder / f"{_key(config, dtype, packs)}.json"
    cached = _read(path)
    if cached is not None:
        log.info("the model is known from an earlier start: %s", path)
        return cached
    facts = examine(config, dtype=dtype, packs=packs)
    try:
        _write(path, facts)
    except OSError as error:
        log.warning("facts of the model cannot be kept in %s: %s; the next start takes longer", path, error.strerror)
    return facts


def examine(config: PreTrainedConfig, *, dtype: torch.dtype, packs: bool) -> ModelFacts:
    """The facts as the meta model shows them. Raises ModelRefused."""
    try:
        meta_model = meta_model_of(config, dtype=dtype)
        layers = check_model(meta_model)
    except ModelRefused as error:
        raise by_kind(error, config.to_diff_dict()) from None
    merged = shared_inputs(meta_model)
    costs = estimate(meta_model, layers, dtype=dtype, packs=packs)
    return ModelFacts(layers=layers, costs=costs, merged=merged, computation=computation_of(meta_model, layers))


def check_same_computation(served: PreTrainedConfig, new: PreTrainedConfig, *, dtype: torch.dtype, packs: bool) -> None:
    """Raises ModelRefused, which names the fields, unless both configs compute the same with the same weights."""
    ours, theirs = served.to_dict(), new.to_dict()
    if ours == theirs:
        return
    before, why = model_facts(served, dtype=dtype, packs=packs).computation, "config.json computes something else"
    try:
        if type(served) is type(new) and model_facts(new, dtype=dtype, packs=packs).computation == before:
            return
    except ModelRefused as error:
        why = f"the model of config.json cannot be served, {error}"
    differing = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    trials = differing[:_MOST_TRIALS] if len(differing) > 1 else ()
    guilty = [name for name in trials if not _computes(served, {name: theirs.get(name)}, before, dtype)]
    ours, theirs = ({name: settings.get(name) for name in guilty or differing} for settings in (ours, theirs))
    raise ModelRefused(
        f"{why}: {'; '.join(list(differences(ours, theirs))[:_MOST_NAMED])}; start the worker with this folder instead"
    )


def _computes(served: PreTrainedConfig, changes: dict[str, Any], computation: str, dtype: torch.dtype) -> bool:
    """Whether the config computes this with these fields changed."""
    if "model_type" in changes:
        return False
    try:
        changed = type(served).from_dict(served.to_dict() | changes)
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
    private_file.put(path, _sum(data).encode() + data)
    files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for old in files[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


def computation_of(meta_model: PreTrainedModel, layers: LayerMap) -> str:
    """The hash. Leaves the meta model's tables with data, on the CPU. Raises ModelRefused."""
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(f"{values!r}\0".encode())

    lengths = default_length(meta_model.config), length_limit(meta_model.config)
    add(type(meta_model).__name__, lengths, layers)
    of_checkpoints = {name: tuple(tensor.shape) for name, tensor in meta_model.state_dict(keep_vars=True).items()}
    for name, shape in of_checkpoints.items():
        add(name, shape)
    with in_bfloat16(meta_model), _Operators(add):
        calls_without_masks(meta_model)
        run_eagerly(meta_model)
    _make_tables(meta_model)
    # Some tables depend on the longest text; a model that was pinned for any length has one of these.
    for length in (2, *lengths):
        pin(meta_model, length)
        for name, table in meta_model.named_buffers():
            if name not in of_checkpoints:
                add(name, tuple(table.shape), hashlib.sha256(table.flatten().view(torch.uint8).numpy().data).digest())
    return digest.hexdigest()


class _Operators(TorchDispatchMode):
    """Passes on every operator: its name, its numbers, and which earlier results it reads."""

    def __init__(self, add: Any) -> None:
        super().__init__()
        self._add = add
        # Results are kept, so that no other object gets their identity.
        self._known: dict[int, tuple[int, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The row of padding matters to gradients alone.
        read = args[:2] if func is torch.ops.aten.embedding.default else args
        self._add(str(func), self._described(read), self._described(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self._described(out)
        return out

    def _described(self, value: Any) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return [self._described(item) for item in value]
        if isinstance(value, dict):
            return [(name, self._described(item)) for name, item in value.items()]
        is_plain = isinstance(value, (str, int, float, complex, torch.dtype, torch.device, torch.layout))
        return value if is_plain or value is None else str(type(value))

    def _tensor(self, value: Tensor) -> object:
        if isinstance(value, nn.Parameter):
            # Not which one, because tied ones are one.
            return "weight", tuple(value.shape)
        number, _ = self._known.setdefault(id(value), (len(self._known), value))
        has_data = not value.is_meta and value.numel() <= _MOST_VALUES
        return number, tuple(value.shape), str(value.dtype), value.tolist() if has_data else None


@torch.no_grad()
def _make_tables(meta_model: PreTrainedModel) -> None:
    """Gives the model's tables (buffers that no checkpoint has) their values, as Transformers does at a load."""
    for module in meta_model.modules():
        tables = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        for name, buffer in tables.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        if tables:
            setattr(module, "_is_hf_initialized", False)  # noqa: B010, its type has only tensors and modules
    meta_model.initialize_weights()


def shared_inputs(meta_model: PreTrainedModel) -> Groups:
    """Names of linear layers in groups of two or more, in the order of their calls.

    The layers of a group are children of one module, are called once each in a step, and receive the same tensor. All
    have a bias, or none has.
    """
    places = {
        module: (name.rpartition(".")[0], name)
        for name, module in meta_model.named_modules()
        if type(module) is nn.Linear
    }
    uses = Counter(id(parameter) for module in meta_model.modules() for parameter in module.parameters(recurse=False))
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))

    hooks = [module.register_forward_pre_hook(note) for module in places]
    try:
        with in_bfloat16(meta_model):
            calls_without_masks(meta_model)
    finally:
        for hook in hooks:
            hook.remove()
    called = Counter(module for module, _ in calls)
    groups: dict[object, list[str]] = {}
    for module, given in calls:
        if called[module] == uses[id(module.weight)] == 1:
            parent, name = places[module]
            # The noted tensors are alive, so their ids differ.
            groups.setdefault((parent, id(given), module.bias is None), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
