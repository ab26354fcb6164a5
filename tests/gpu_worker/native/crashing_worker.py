"""The worker as a program that crashes in its warm-up: `python -m tests.gpu_worker.native.crashing_worker FLAGS`.

It overwrites its stack, to the end and beyond, so that the stacks that Python writes are a second crash.
"""

import ctypes
import runpy
from pathlib import Path

from gpu_worker import phases


def main() -> None:
    """See the module's docstring."""
    begin = phases.begin_phase

    def crashes(name: str) -> None:
        begin(name)
        if name == "warm-up":
            [line] = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[stack]")]
            end = int(line.split()[0].split("-")[1], 16)
            ctypes.memset(end - (1 << 17), 255, 1 << 18)

    phases.begin_phase = crashes
    runpy.run_module("gpu_worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
