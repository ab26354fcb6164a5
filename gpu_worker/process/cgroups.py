"""The control groups of this process, in both versions of Linux's interface, and their limits of memory.

Owns where their files are. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """Bytes that the processes of a control group may have, and those of them that are left."""

    limit: int
    left: int


def memory_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[GroupMemory]:
    """Yields the memory of each group of this process with a limit; reclaimable file pages count as left.

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
        found = [int(text) for name in limits if (text := text_of(folder / name).strip()).isdigit()]
        if found and used.isdigit():
            stat = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
            yield GroupMemory(limit=min(found), left=min(found) - int(used) + int(stat.get(reclaimable, 0)))


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
