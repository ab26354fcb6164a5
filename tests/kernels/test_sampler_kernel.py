"""The sampler's Triton kernels without a GPU: they compile for every card, spill nothing, and choose the right tokens.

Needs Triton. `interpreted_sampler.py` has the tests of results. Triton's interpreter runs them in a process of its own,
because the interpreter has to be chosen before Triton is imported.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gpu_worker.sampling import choose_kernel  # noqa: E402
from tests.kernels.cards import H200  # noqa: E402
from tests.kernels.fake_device import Driver  # noqa: E402

ROOT = Path(__file__).parents[2]
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TYPES = {
    **dict.fromkeys(("stride", "vocab_size", "num_blocks"), "i32"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "peaks", "scores", "floors"), "*fp32"),
    **dict.fromkeys(("top_k", "seed", "sample_idx", "position", "at", "tokens"), "*i64"),
    "places": "*i32",
}
# What a block may take so that two fit an SM: registers of a thread, and bytes of shared memory.
MOST_REGISTERS, MOST_SHARED = 128, 48 << 10


def specialised(kernel: triton.JITFunction, dtype: torch.dtype, vocab_size: int, variant: str) -> ASTSource:
    """The kernel as a launch specialises it: parameters of any alignment, other tensors and multiples of 16 known."""
    launch = choose_kernel.constants_of(vocab_size, dtype, may_ban=variant == "revise")
    absent = {"greedy": choose_kernel.PARAMETERS, "draw": ["at"], "revise": []}[variant]
    constants = {**launch, **dict.fromkeys(absent)}
    sizes = {"stride": vocab_size, "vocab_size": vocab_size, "num_blocks": triton.cdiv(vocab_size, launch["BLOCK"])}
    aligned = [
        name for name in kernel.arg_names if name not in choose_kernel.PARAMETERS and sizes.get(name, 0) % 16 == 0
    ]
    names = {name: i for i, name in enumerate(kernel.arg_names)}
    types = {**TYPES, "logits": POINTERS[dtype]}
    return ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(i,): constants[name] for name, i in names.items() if name in constants},
        attrs={(names[name],): [["tt.divisibility", 16]] for name in aligned if name not in constants},
    )


def ptxas_report(ptx: str, capability: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(PTXAS), "-v", f"--gpu-name={architecture}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


CASES = [
    *((capability, torch.bfloat16, 151_936) for capability in (80, 86, 89, 90)),
    *((90, dtype, 151_936) for dtype in (torch.float16, torch.float32)),
    *((90, torch.bfloat16, vocab_size) for vocab_size in (131, 50_257, 256_128)),
]


@pytest.mark.parametrize("variant", ["greedy", "draw", "revise"])
@pytest.mark.parametrize(("capability", "dtype", "vocab_size"), CASES)
def test_kernels_compile_without_spills_and_two_blocks_fit_an_sm(
    capability: int, dtype: torch.dtype, vocab_size: int, variant: str
) -> None:
    for kernel in (choose_kernel.summarise, choose_kernel.decide):
        source = specialised(kernel, dtype, vocab_size, variant)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=choose_kernel.OPTIONS)
        report = ptxas_report(compiled.asm["ptx"], capability)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
        assert int(re.search(r"Used (\d+) registers", report)[1]) <= MOST_REGISTERS
        assert compiled.metadata.shared <= MOST_SHARED
        if kernel is choose_kernel.decide and variant != "greedy" and vocab_size % 16 == 0:
            assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "16 bytes at once, ahead of their use"


def parameters(num_rows: int, offset: int) -> tuple[torch.Tensor, ...]:
    """DrawInputs' columns as staging lays them out: aligned to 8 bytes, `offset` words from an aligned address."""
    words = torch.zeros(7, num_rows + 8, dtype=torch.int64)
    numbers = [words[i].view(torch.float32)[2 * offset : 2 * offset + num_rows] for i in range(3)]
    return *numbers, *(words[i][offset : offset + num_rows] for i in range(3, 7))


def test_launches_of_any_number_of_rows_and_any_alignment_share_one_compiled_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warm-up compiles all that serving needs: by a step without a row that draws, one with some, and one revised."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(H200))
    vocab_size, kernels = 2500, (choose_kernel.summarise, choose_kernel.decide)
    for kernel in kernels:
        run = kernel.run
        kernel.device_caches.clear()
        monkeypatch.setattr(
            kernel, "run", lambda *given, grid, warmup, run=run, **named: run(*given, grid=grid, warmup=True, **named)
        )
    for num_rows, offset in ((1, 0), (3, 1), (16, 2), (17, 3)):
        logits, at = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
        choose_kernel.choose_on_gpu(logits, (None,) * 7, None, False)
        choose_kernel.choose_on_gpu(logits, parameters(num_rows, offset), None, False)
        at = at[offset : offset + num_rows]
        choose_kernel.choose_on_gpu(logits.float(), parameters(num_rows, offset), at, True)
        assert [len(kernel.device_caches[0][0]) for kernel in kernels] == [3, 3], (num_rows, offset)


def test_results_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    tests = Path(__file__).with_name("interpreted_sampler.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
