"""A control group that holds this process, and the processes that it starts from now on, to a part of a core."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextmanager
def cpu_quota(cores: float) -> Iterator[None]:
    """Raises OSError where this process may make no control groups."""
    quota = round(cores * _PERIOD_US)
    unified = (_ROOT / "cgroup.controllers").exists()
    parent = _ROOT if unified else _ROOT / "cpu"
    if unified:
        (parent / "cgroup.subtree_control").write_text("+cpu")
    group = parent / f"tandem-tests-{os.getpid()}"
    group.mkdir()
    try:
        if unified:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        # The group stays while a process that this one has started still runs in it.
        with suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
