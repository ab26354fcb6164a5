"""The census of groups: each class on several ranks against one process. Owns the ranks' processes and the report."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gpu_worker.sharding.plan import FILE, proven
from tests.census.ranked import Shared
from tests.rigs.processes import popen

# Of the names of plans by which ranks compute the KV heads of others, too.
_SUFFIX = ", KV heads on several ranks"


def shared_by(names: Sequence[str], size: int, kv_heads: int = 0) -> Iterator[Shared]:
    """The results of these model types on `size` ranks of this machine, each when it is there.

    kv_heads: how many KV heads the models have, 0 for as many as in the ordinary census.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-census-") as folder, ExitStack() as stack:
        processes = [
            stack.enter_context(
                popen(
                    *("tests.census.ranked", str(rank), str(size), str(kv_heads), folder, *names),
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


def run_groups(names: Sequence[str], size: int, kv_heads: int, *, write: bool) -> int:
    """Prints every result and their number; with `write` replaces these plans in the file of proven ones.

    A worker refuses a class with wrong logits if its plan is not in that file. Returns 1 if a class has no
    result, or is wrong although its plan is in the file.
    """
    results: list[Shared] = []
    known = proven().values()
    for shared in shared_by(names, size, kv_heads):
        if shared.result == "wrong" and (write or shared.plan not in known):
            shared = replace(shared, result="refused for errors")
        results.append(shared)
        told = f"{shared.model_type:26} {shared.result:22} {shared.detail}"
        print(f"{len(results):3}/{len(names)} {told}", flush=True)
    kinds = sorted({shared.result for shared in results})
    print("; ".join(f"{sum(shared.result == kind for shared in results)} {kind}" for kind in kinds))
    if write:
        suffix = _SUFFIX if kv_heads and kv_heads < size else ""
        others = {name: plan for name, plan in proven().items() if name.endswith(_SUFFIX) is not bool(suffix)}
        equal = {f"{each.model_type}{suffix}": each.plan for each in results if each.result.startswith("equal")}
        # Where the plan leaves attention whole, the number of KV heads does not change it.
        known = others.values() if suffix else ()
        plans = others | {name: plan for name, plan in equal.items() if plan not in known}
        FILE.write_text(json.dumps(dict(sorted(plans.items())), indent=1) + "\n")
    return int(len(results) < len(names) or any(shared.result == "wrong" for shared in results))
