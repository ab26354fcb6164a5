"""The CPUs that this process may use: its affinity, the quota of its control groups, physical cores.

Owns the queries. Decides nothing, and imports no torch.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.process.cgroups import groups_of, text_of

PROC, SYSTEM = Path("/proc"), Path("/sys")


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
    found = tuple(text_of(topology / name).strip() for name in ("physical_package_id", "core_id"))
    return found if all(found) else (str(cpu),)


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
