"""Carries out an order to load new weights: checks, copies in place, and repeats the self-check.

First everything is checked: `read_weights` loads the folder as a start does, and its values are finite; `check_targets`
finds the memory of each tensor. Until then an error refuses the order, and nothing has changed. Then `replace_weights`
copies, so that every tensor keeps its memory; an error in it ends the worker. A rank of a group checks the whole
weights and copies its part. Owns the way from a parameter's name to the memory that holds it: packed, merged, shared by
ranks, or in a native operator. Knows nothing of pages, plans or sockets.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelFiles, ModelRefused, check_described, read_files
from gpu_worker.checkpoint.folder import WeightFiles, opened_weights
from gpu_worker.checkpoint.linear import MergedLinear, PackedLinear
from gpu_worker.checkpoint.loading import load_plain, own_part
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.cpu.forwards import NativeNorm
from gpu_worker.failures import first_line
from gpu_worker.process.ranks import SINGLE, Ranks
from gpu_worker.step.runner import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeights:
    """Weights that were checked, still in their files where no conversion was needed."""

    files: WeightFiles
    # By the names of the model's parameters and persistent buffers; tied ones have several names.
    tensors: Mapping[str, Tensor]
    # Size and times of each file, as they were before the check.
    states: tuple[tuple[int, ...], ...]

    def has_changed(self) -> bool:
        """Whether a file was written, replaced or removed since the check began."""
        return _states(self.files) != self.states


def read_weights(files: ModelFiles, dtype: torch.dtype) -> NewWeights:
    """Loads the weights of a folder as a start does, and checks them. Raises ModelRefused, or OSError."""
    states = _states(files.weights)
    model = load_plain(files, dtype=dtype)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelRefused(f"{name} in {files.folder} has values that are not finite")
    weights = NewWeights(files=files.weights, tensors=tensors, states=states)
    if weights.has_changed():
        raise ModelRefused(
            f"{files.folder} changed while it was checked; write weights to a new folder for each version"
        )
    return weights


def _states(files: WeightFiles) -> tuple[tuple[int, ...], ...]:
    try:
        stats = [path.stat() for path in files.paths]
    except OSError:
        return ()
    # A file that is held open has no name after it was removed or replaced.
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns, min(stat.st_nlink, 1)) for stat in stats)


def check_targets(model: nn.Module, weights: NewWeights, ranks: Ranks = SINGLE) -> None:
    """Raises ModelRefused unless every tensor has memory of its shape, or of this rank's part, in the served model."""
    for name, tensor in weights.tensors.items():
        target = _target(model, name)
        if _part(tensor, target.shape, ranks).shape != target.shape:
            raise ModelRefused(f"{name} is {list(tensor.shape)}, the served model's is {list(target.shape)}")
    for first, *others in _tied(model, weights.tensors):
        ours = weights.tensors[first]
        for name in others:
            theirs = weights.tensors[name]
            if theirs.data_ptr() != ours.data_ptr() and not torch.equal(theirs, ours):
                raise ModelRefused(
                    f"{name} differs from {first}, and the served model has one tensor for both; "
                    "start the worker with this folder instead"
                )


def _tied(model: nn.Module, names: Iterable[str]) -> Iterator[list[str]]:
    """Names of tensors that have the same memory in the model. Packed and merged layers have their own."""
    by_memory: dict[int, list[str]] = {}
    for name in names:
        module, leaf = _place(model, name)
        has_own = isinstance(module, (PackedLinear, MergedLinear))
        if not has_own and (target := own_part(getattr(module, leaf))).numel():
            by_memory.setdefault(target.data_ptr(), []).append(name)
    return (same for same in by_memory.values() if len(same) > 1)


def _part(tensor: Tensor, shape: torch.Size, ranks: Ranks) -> Tensor:
    """Returns this rank's part, of this shape, of a tensor that the ranks share; else the tensor itself.

    Ranks share one dimension, in parts of the sizes that torch.chunk gives, as torch's DTensor lays them out.
    """
    if tensor.shape == shape or tensor.dim() != len(shape):
        return tensor
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != shape[dim]]
    chunks = tensor.chunk(ranks.size, dims[0])
    return chunks[ranks.rank] if len(dims) == 1 and ranks.rank < len(chunks) else tensor


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ModelRefused(f"{name} is unknown to the served model") from None
    # A layer that ranks share has its product, and perhaps its bias, in a layer of its own.
    part = getattr(module, "part", None)
    if isinstance(part, nn.Module) and (leaf == "weight" or getattr(part, leaf, None) is not None):
        return part, leaf
    return module, leaf


def _target(model: nn.Module, name: str) -> Tensor:
    module, leaf = _place(model, name)
    if isinstance(module, (PackedLinear, MergedLinear)) and leaf == "weight":
        return torch.empty(module.out_features, module.in_features, device="meta")
    target = getattr(module, leaf, None)
    if not isinstance(target, Tensor):
        raise ModelRefused(f"{name} is unknown to the served model")
    return target


@torch.no_grad()
def replace_weights(model: nn.Module, weights: NewWeights, ranks: Ranks = SINGLE) -> None:
    """Copies the weights, or this rank's part, into the model. Raises RuntimeError if a file changed meanwhile."""
    parts: dict[nn.Module, dict[int, dict[str, Tensor]]] = {}
    copied: set[int] = set()
    for name, whole_tensor in weights.tensors.items():
        module, leaf = _place(model, name)
        tensor = _part(whole_tensor, _target(model, name).shape, ranks)
        if isinstance(module, MergedLinear):
            parts.setdefault(module.whole, {}).setdefault(module.begin, {})[leaf] = tensor
        elif isinstance(module, PackedLinear):
            module.replace(leaf, tensor)
        else:
            target, tensor = _local(getattr(module, leaf), tensor)
            # Tied ones are equal.
            if target.data_ptr() not in copied:
                copied.add(target.data_ptr())
                target.copy_(tensor)
    for whole, of_layers in parts.items():
        layers = [tensors for _, tensors in sorted(of_layers.items())]
        for leaf in layers[0]:
            merged = torch.cat([tensors[leaf] for tensors in layers])
            if isinstance(whole, PackedLinear):
                whole.replace(leaf, merged)
            else:
                getattr(whole, leaf).copy_(merged)
    for module in model.modules():
        if isinstance(forward := module.__dict__.get("forward"), NativeNorm):
            forward.refresh()
    if weights.has_changed():
        raise RuntimeError("files of the new weights changed while they were copied; the worker has a mixture and ends")


def _local(target: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's memory of a target that ranks may share (a DTensor), and its part of the tensor."""
    if not hasattr(target, "to_local"):
        return target, tensor
    from torch.distributed.tensor import distribute_tensor

    # No data is sent, because each rank has the whole tensor.
    shared = distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return target.to_local(), shared.to_local()


@dataclass(slots=True, eq=False)
class WeightsLoader:
    """Loads weights into one served model, or into a rank's part of it."""

    model: PreTrainedModel
    # Those that the worker started with.
    files: ModelFiles
    runner: Runner
    _: KW_ONLY
    dtype: torch.dtype
    # As the model has them (`check_runner`).
    layers: LayerMap
    # Raises ModelRefused for a config that computes something else than the model's.
    check_config: Callable[[PreTrainedConfig], None]
    ranks: Ranks = SINGLE
    # Whether all ranks of a group say yes; each calls it once per order.
    agree: Callable[[bool], bool] = bool

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        """Loads, and returns the answer. Raises an error of the machine or ModelRefused after a byte was written."""
        with ExitStack() as opened:
            begun = time.perf_counter()
            weights, refusal = self._checked(order, opened)
            if not self.agree(weights is not None):
                detail = refusal or "another rank of the group refuses them, as its log shows"
                log.warning("weights %r are refused: %s", order.version, detail)
                return pb.WeightsLoaded(version=order.version, ok=False, detail=detail)
            assert weights is not None
            checked = time.perf_counter()
            replace_weights(self.model, weights, self.ranks)
            if self.runner.device.type == "cuda":
                torch.cuda.synchronize(self.runner.device)
            copied = time.perf_counter()
            self.runner.labels.forget()
            if not order.keep_rows:
                # It uses rows and pages of its own, so it is left out where they must stay.
                check_runner(self.model, self.runner, self.dtype, unbounded=self.layers)
        log.info(
            "weights %r from %s: checked in %.3f s, copied in %.3f s, self-check in %.3f s",
            *(order.version, order.folder, checked - begun, copied - checked, time.perf_counter() - copied),
        )
        return pb.WeightsLoaded(version=order.version, ok=True)

    def _checked(self, order: pb.LoadWeights, opened: ExitStack) -> tuple[NewWeights | None, str]:
        """The weights; `opened` closes their files; or None and why they are refused."""
        view = ""
        try:
            folder = opened.enter_context(opened_weights(order.folder, order.roots))
            view = str(folder)
            files = read_files(folder, self.files)
            self.check_config(files.config)
            check_described(self.files, files)
            weights = read_weights(files, self.dtype)
            check_targets(self.model, weights, self.ranks)
        except Exception as error:  # also any error of Transformers, which a start would end with
            is_plain = isinstance(error, (ValueError, OSError, MemoryError, RuntimeError))
            why = first_line(error) if is_plain else f"{type(error).__name__}: {first_line(error)}"
            return None, why.replace(view, order.folder) if view else why
        return weights, ""
