"""Compiles a generated kernel to a cubin with Triton and ptxas, and reads what it takes of a multiprocessor.

Owns the reading of ptxas's report and the arithmetic of occupancy. A process has compiled nothing that Triton's cache
could return: the report exists only where ptxas runs, so `TRITON_CACHE_DIR` must be a new folder.
"""

import contextlib
import io
import re
from dataclasses import dataclass

from torch._inductor.codecache import _load_triton_kernel_from_source
from triton import knobs

from tests.kernels.cards import KIB, Card
from tests.kernels.generate import Kernel

_REGISTERS, _REGISTERS_PER_WARP_UNIT = 65536, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one block of a kernel takes; bytes and counts by ptxas."""

    warps: int
    stages: int
    registers: int
    shared: int
    # Bytes of spilled registers stored and loaded, and of a thread's stack.
    spilled: int
    stack: int
    # The kinds of instructions that show how it works: cp.async, wgmma, mma.
    copies: int
    products: str

    def blocks_per_multiprocessor(self, card: Card) -> int:
        """Blocks that are resident at once, by registers, shared memory, threads, and the card's own limit."""
        per_warp = -(-self.registers * 32 // _REGISTERS_PER_WARP_UNIT) * _REGISTERS_PER_WARP_UNIT
        return min(
            _REGISTERS // (per_warp * self.warps),
            card.shared_per_multiprocessor // (self.shared + KIB),
            card.threads_per_multiprocessor // (32 * self.warps),
            card.blocks_per_multiprocessor,
        )


def compiled(kernel: Kernel) -> Resources:
    """The resources of the kernel on the imitated card. Raises what Triton raises if it does not compile."""
    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as output:
        autotuner = _load_triton_kernel_from_source(kernel.name, kernel.source)
        autotuner.precompile(warm_cache_only=True)
    (result,) = autotuner.compile_results
    report, ptx, metadata = output.getvalue(), result.kernel.asm["ptx"], result.kernel.metadata
    stack, stores, loads = _numbers(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    return Resources(
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        registers=_numbers(r"Used (\d+) registers", report)[0],
        shared=metadata.shared,
        spilled=stores + loads,
        stack=stack,
        copies=len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
        products="wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "fma",
    )


def _numbers(pattern: str, report: str) -> list[int]:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(f"ptxas reported no such line as {pattern!r}: {report[:500]!r}")
    return [int(number) for number in found.groups()]
