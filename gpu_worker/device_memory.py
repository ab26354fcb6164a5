"""What memory there is and what things take: free on the device, weights and activations of a twin, resident growth.

Owns the asking: of CUDA, of /proc and cgroups, of a model without weights. Decides nothing.
"""

import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """What this process can still take on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Main memory that can be had without swapping: of the machine, and of each control group around this process."""
    figures = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE))
    if "MemAvailable" in figures:
        free = int(figures["MemAvailable"]) << 10
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *_left_in_groups(proc, cgroups)]))


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What is left in each group with a limit, file pages that would be given up counted as free."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = cgroups / "memory" if controllers else cgroups
        limit, current, reclaimable = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        # In a namespace of its own the path may not exist under the mount, whose root is then the group.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            most, used = _text(folder / limit).strip(), _text(folder / current).strip()
            if most.isdigit() and used.isdigit():
                stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
                yield int(most) - int(used) + int(stat.get(reclaimable, 0))
            if folder == base:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def twin_weight_bytes(twin: nn.Module, *, packs: bool) -> int:
    """Bytes of the weights that a twin on the meta device stands for, a tied one once.

    packs: linear layers are packed; a tied one is packed as a copy.
    """
    total = sum(parameter.numel() * parameter.element_size() for parameter in twin.parameters())
    if not packs:
        return total
    linear = {id(module.weight): module.weight for module in twin.modules() if type(module) is nn.Linear}
    others = {id(module.weight) for module in twin.modules() if isinstance(module, nn.Embedding)}
    return total + sum(linear[tied].numel() * linear[tied].element_size() for tied in linear.keys() & others)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made within, as if each operator took no workspace; on any device, meta too."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, weakref.finalize[..., Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._known:
                self.live += size
                self.peak = max(self.peak, self.live)
                self._known[key] = weakref.finalize(storage, self._forget, key, size)
        return result

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


@contextmanager
def resident_growth(device: torch.device) -> Iterator[list[int]]:
    """Appends how much memory grew at its peak within: allocated on CUDA, resident on Linux; elsewhere nothing."""
    grown: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield grown
        torch.cuda.synchronize(device)
        grown.append(torch.cuda.max_memory_allocated(device) - before)
        return
    try:
        # Sets the peak back to what is resident now.
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        yield grown
        return
    before = _status("VmRSS")
    yield grown
    grown.append(max(0, _status("VmHWM") - before))


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _text(PROC / "self" / "status"), re.MULTILINE)
    return int(found.group(1)) << 10 if found else 0
