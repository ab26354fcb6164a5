"""What this process may use of its machine: CPUs by affinity and quota, memory by the limits of its control groups.

Owns where the files of control groups are, in both versions of Linux's interface. Decides nothing. Imports no torch.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, SYSTEM = Path("/proc"), Path("/sys")
CGROUPS = SYSTEM / "fs" / "cgroup"


def memory_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[int, int]]:
    """Yields bytes for each group of this process with a limit: the limit, and what is left with reclaimable pages.

    Above `memory.high` the kernel slows a group down until it hardly runs, so that is a limit, too.
    """
    for folder, is_version_1 in groups_of("memory", proc, cgroups):
        limits, current, reclaimable = (
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
            if is_version_1
            else (("memory.max", "memory.high"), "memory.current", "inactive_file")
        )
        used = text_of(folder / current).strip()
        # Without a limit a file has "max", or a number beyond all memory in version 1.
        numbers = [int(text) for name in limits if (text := text_of(folder / name).strip()).isdigit()]
        if numbers and used.isdigit():
            stat = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
            yield min(numbers), min(numbers) - int(used) + int(stat.get(reclaimable, 0))


def groups_of(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of the groups with this controller (cpu, memory), from the process's own up to the mount; and whether
    they have the files of version 1.

    proc, cgroups: the mounts of /proc and of the groups.
    """
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = cgroups / controller if controllers else cgroups
        # In a cgroup namespace the path may not exist under the mount; the mount's root is then the group.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, bool(controllers)
            if folder == base:
                break


def text_of(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """What a process may use: logical CPUs, their physical cores, and CPUs' worth of time (None: no quota)."""

    logical: int
    cores: int
    quota: float | None = None


def usable_cpus(proc: Path = PROC, system: Path = SYSTEM, affinity: Iterable[int] | None = None) -> Cpus:
    """The CPUs of this process. affinity: its CPUs, by default as the kernel lists them."""
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    cores = {_core(cpu, system) for cpu in cpus}
    quota = min(_quotas(proc, system / "fs" / "cgroup"), default=None)
    return Cpus(logical=len(cpus), cores=len(cores), quota=quota)


def _core(cpu: int, system: Path) -> tuple[str, ...]:
    """What the siblings of a core share; the CPU itself where the system does not say."""
    topology = system / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
    ids = tuple(text_of(topology / name).strip() for name in ("physical_package_id", "core_id"))
    return ids if all(ids) else (str(cpu),)


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """The quota of each control group of this process that has one, as a number of CPUs."""
    for folder, is_version_1 in groups_of("cpu", proc, cgroups):
        if is_version_1:
            quota, period = (text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        else:
            quota, _, period = text_of(folder / "cpu.max").strip().partition(" ")
        # Without a limit the quota is "max", or -1 in version 1.
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)
