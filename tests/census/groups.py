"""The census of groups: each class on several ranks against one process. Owns the ranks' processes and the report."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from gpu_worker.sharding import proven
from tests.census.ranked import Shared


def shared_by(names: Sequence[str], size: int) -> Iterator[Shared]:
    """The results of these model types on `size` ranks of this machine, each when it is there."""
    with tempfile.TemporaryDirectory(prefix="tandem-census-") as folder, ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.census.ranked", str(rank), str(size), folder, *names],
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(size)
        ]
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                yield Shared(**json.loads(line))
        finally:
            for process in processes:
                process.kill()


def run_groups(names: Sequence[str], size: int, *, write: bool) -> int:
    """Prints every result and their number; writes the file of proven plans.

    Returns 1 if a class has no result, or is wrong although its plan is in the file.
    """
    results: list[Shared] = []
    for shared in shared_by(names, size):
        results.append(shared)
        told = f"{shared.model_type:26} {shared.result:22} {shared.detail}"
        print(f"{len(results):3}/{len(names)} {told}", flush=True)
    kinds = sorted({shared.result for shared in results})
    print("; ".join(f"{sum(shared.result == kind for shared in results)} {kind}" for kind in kinds))
    if write:
        proven.write({shared.model_type: shared.plan for shared in results if shared.result.startswith("equal")})
    known = proven.proven().values()
    return int(len(results) < len(names) or any(one.result == "wrong" and one.plan in known for one in results))
