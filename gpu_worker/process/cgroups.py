"""The control groups of this process, in both versions of Linux's interface.

Owns where their files are. Imports no torch.
"""

from collections.abc import Iterator
from pathlib import Path


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
