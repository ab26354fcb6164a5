"""The CPUs of a process: affinity, cores and their siblings, quotas of control groups in both versions."""

import os
from pathlib import Path

import pytest

from gpu_worker.process.machine import Cpus, usable_cpus


def machine(tmp_path: Path, *, cores: list[int], groups: str = "") -> tuple[Path, Path]:
    """/proc and /sys of a machine; cores: the core of each CPU."""
    proc, system = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    for cpu, core in enumerate(cores):
        topology = system / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    return proc, system


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_siblings_count_as_one_core_and_affinity_limits_both(tmp_path: Path) -> None:
    places = machine(tmp_path, cores=[0, 1, 2, 3, 0, 1, 2, 3])
    assert usable_cpus(*places, affinity=range(8)) == Cpus(logical=8, cores=4)
    assert usable_cpus(*places, affinity=[0, 4, 1]) == Cpus(logical=3, cores=2)


def test_a_cpu_without_topology_is_a_core(tmp_path: Path) -> None:
    assert usable_cpus(*machine(tmp_path, cores=[]), affinity=[0, 1, 2]) == Cpus(logical=3, cores=3)


@pytest.mark.parametrize(
    ("inner", "outer", "quota"),
    [("max 100000", "max 100000", None), ("150000 100000", "max 100000", 1.5), ("400000 100000", "100000 50000", 2.0)],
)
def test_the_least_quota_of_the_control_groups_counts(
    tmp_path: Path, inner: str, outer: str, quota: float | None
) -> None:
    proc, system = machine(tmp_path, cores=[0, 1, 2, 3], groups="0::/user/worker\n")
    write(system / "fs" / "cgroup" / "user" / "worker", cpu__max=inner)
    write(system / "fs" / "cgroup" / "user", cpu__max=outer)
    assert usable_cpus(proc, system, range(4)) == Cpus(logical=4, cores=4, quota=quota)


def test_quotas_of_version_1_count(tmp_path: Path) -> None:
    proc, system = machine(tmp_path, cores=[0, 1, 2, 3], groups="3:cpuset:/x\n2:cpu,cpuacct:/x\n0::/\n")
    write(system / "fs" / "cgroup" / "cpu" / "x", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert usable_cpus(proc, system, range(4)).quota is None
    write(system / "fs" / "cgroup" / "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert usable_cpus(proc, system, range(4)).quota == 3.0


def test_this_machine_has_cpus() -> None:
    found = usable_cpus()
    assert found.logical == len(os.sched_getaffinity(0))
    assert 1 <= found.cores <= found.logical
