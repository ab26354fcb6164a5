"""The kernel that writes K and V, without a GPU: it compiles for each card without spills, and writes the right places.

Needs Triton. Triton's interpreter runs the worker's own test of it in another process, because the interpreter has to
be chosen before Triton is imported.
"""

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gpu_worker.cuda import kv_writes  # noqa: E402
from tests.kernels.cards import CARDS  # noqa: E402
from tests.kernels.test_sampler_kernel import POINTERS, ROOT, ptxas_report  # noqa: E402


@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (4, 256), (3, 48), (32, 128)])
@pytest.mark.parametrize("capability", sorted({card.sm for card in CARDS.values()}))
def test_it_compiles_without_spills(capability: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    constants = {"HEADS": heads, "KEY_DIM": dim, "VALUE_DIM": dim, "DIM": dim}
    constants |= {"ALL_HEADS": triton.next_power_of_2(heads), "ALL_DIMS": triton.next_power_of_2(dim)}
    pointers = dict.fromkeys(("key", "value", "keys", "values"), POINTERS[dtype]) | {"slots": "*i64"}
    names = kv_writes._write.arg_names
    source = ASTSource(
        fn=kv_writes._write,
        signature={name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    report = ptxas_report(compiled.asm["ptx"], capability)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
    assert compiled.metadata.shared == 0


def test_it_writes_as_indexed_assignment_does() -> None:
    tests = "tests/gpu_worker/cuda/test_kv_writes.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "tests/kernels/pytest.ini", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "--rootdir", str(ROOT)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
