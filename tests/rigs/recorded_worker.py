"""A worker with padded, captured and replayed steps, on a CPU: `python -m tests.rigs.recorded_worker`.

It is `gpu_worker` without C++ kernels, with `graph_recorder.py` in the place of CUDA graphs, and with few shapes,
because each shape of attention is a kernel to compile; with `--plain-attention` none is compiled. A padded step that
would run eagerly fails.
"""

import os
import sys
from contextlib import nullcontext
from typing import Any

import gpu_worker.startup
from gpu_worker.__main__ import main
from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.cuda.graphs import CapturedSteps
from gpu_worker.geometry import Geometry
from gpu_worker.native.library import leave_out_kernels
from gpu_worker.step.runner import Runner
from tandem_contract.files import use_caches
from tests.rigs.graph_recorder import GraphRecorder
from tests.rigs.padded_shapes import few_shapes, padded_runner
from tests.rigs.plain_flex import plain_flex

PLAIN_ATTENTION = "--plain-attention"
# Decode rows of the smaller bucket.
_FEW_ROWS = 4


def recorder() -> GraphRecorder:
    """A recorder for steps of the worker on a CPU."""
    return GraphRecorder(opaque=[(FlexKernel, "__call__")], transparent=["tandem::attend"])


class _Replayed(CapturedSteps[Any]):
    """Refuses to run a captured shape eagerly."""

    def replay(self, shape: Any) -> Any:
        result = super().replay(shape)
        if result is None and not shape.prompt_logits:
            raise AssertionError(f"{shape} has no graph")
        return result


def recorded_runner(model: Any, layers: Any, geometry: Geometry, **options: Any) -> Runner:
    """A runner with steps that the recorder replays. Every shape is captured; on a GPU its memory decides which."""
    own = {name: options[name] for name in ("device", "dtype", "pool")}
    runner = padded_runner(model, layers, geometry, shapes=few_shapes(geometry, _FEW_ROWS, geometry.max_rows), **own)
    runner.steps.graphs = _Replayed(recorder())
    return runner


if __name__ == "__main__":
    leave_out_kernels()
    use_caches(os.environ)
    gpu_worker.startup.runner_of = recorded_runner
    with plain_flex() if PLAIN_ATTENTION in sys.argv else nullcontext():
        exit_code = main([argument for argument in sys.argv[1:] if argument != PLAIN_ATTENTION])
    os._exit(exit_code)
