"""The rigs that tests of the worker share; each costs a pair of kernels, or two."""

from dataclasses import replace

import torch

from tests.gpu_worker.rig import RigSpec

SPECS = [
    RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32),
    RigSpec(page_size=64, group=2, head_dim=64),
    RigSpec(page_size=128, group=3, head_dim=64, family="llama"),
    RigSpec(page_size=16, group=7, head_dim=64),
    RigSpec(page_size=64, group=1, head_dim=256),
    RigSpec(page_size=128, group=2, head_dim=256, dtype=torch.float16),
    RigSpec(page_size=64, group=2, head_dim=64, dtype=torch.bfloat16),
    RigSpec(page_size=16, group=7, head_dim=64, family="mistral", window=37, dtype=torch.bfloat16),
    # Each has one layer with a window and one without.
    RigSpec(page_size=16, group=2, head_dim=24, family="gemma2", window=21, chunk_align=32),
    RigSpec(page_size=16, group=3, head_dim=40, family="gpt_oss", window=9),
    # Sink tokens that end inside their second page; and inside their first, beside layers with their own window.
    # A text may be longer than the pool of the first.
    RigSpec(page_size=16, group=3, head_dim=64, family="llama", bound=(7, 17), num_pages=14, max_length=400),
    RigSpec(page_size=64, group=2, head_dim=64, family="gemma2", window=21, bound=(50, 5)),
]
# Torch's operators compute what the C++ kernels do not cover, as float16, and everything if they are not built.
ON_TORCH = [replace(SPECS[idx], native=False) for idx in (8, 9, 10)]
# FlexAttention computes on a GPU, and padded steps of a CPU.
FLEX = replace(SPECS[5], padded=True)
ON_FLEX = [replace(SPECS[idx], padded=True) for idx in (0, 7, 8, 9, 10)]
# Their kernels are variants of the others', so tests on these rigs are long.
LONG = frozenset([*(SPECS[idx] for idx in (1, 2, 3, 4, 6, 11)), *ON_FLEX])
SPECS += [*ON_TORCH, FLEX, *ON_FLEX]
