"""Where the time of a step goes, from torch's profiler on replayed plans.

Owns the groups of operators. Only some steps are profiled, but all are executed, because each needs the ones before it.
The profiler slows Python down and leaves operators nearly as they are: shares are of the time that the same steps took
without it, and `host` is what no operator covers. C++ kernels are not torch's operators, so `trace_kernels` must have
been called before the runner was made; captured steps then replay their kernels one by one.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from gpu_worker.cpu.graphs import CpuGraph
from gpu_worker.native.library import NativeFunction, NativeLibrary, RecordedCall, RecordedCalls
from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import parse_frame
from tests.measure.serving import replay
from tests.measure.serving.replay import Recording, Span

_GROUPS = (
    ("decode attention", re.compile("decode")),
    ("prefill attention", re.compile("prefill")),
    ("linears", re.compile("linear|::mm|addmm|matmul|::bmm")),
    ("sampling", re.compile("argmax|greedy|topk|sample")),
    # What is left of attention: writing K and V, moving parts together; with FlexAttention, its kernels too.
    ("attention, the rest", re.compile("attend|flex|Compiled")),
)
_SMALL, _SAMPLING, _HOST = "small operators", "sampling", "host"
_NUM_STEPS = 12
_NUM_LARGEST = 10


def trace_kernels() -> None:
    """Lets the profiler see the C++ kernels, for 0.3 us per call."""
    call, make_graph = NativeFunction.__call__, CpuGraph.__init__

    def traced_call(self: NativeFunction, *arguments: Any) -> None:
        with torch._C._profiler._RecordFunctionFast(self.name):
            call(self, *arguments)

    def traced_graph(self: CpuGraph, library: NativeLibrary, calls: Sequence[Any], constants: Sequence[Any]) -> None:
        make_graph(self, library, [], constants)
        self.parts += [_traced(library, each) if isinstance(each, RecordedCall) else each for each in calls]

    NativeFunction.__call__, CpuGraph.__init__ = traced_call, traced_graph


def _traced(library: NativeLibrary, call: RecordedCall) -> Callable[[], None]:
    alone = RecordedCalls(library.functions, [call])

    def repeat() -> None:
        with torch._C._profiler._RecordFunctionFast(call.name):
            alone()

    return repeat


def measure(runner: Runner, recording: Recording, spans: Sequence[Span]) -> dict[str, Any]:
    """Returns for decode steps and for steps with prompt tokens the shares of each group and the largest operators.

    spans: begin and end of each step without the profiler.
    """
    kinds: dict[str, list[int]] = {"decode steps": [], "steps with prompts": []}
    for i, frame in enumerate(recording.frames):
        plan = parse_frame(frame).plan
        kinds["steps with prompts" if plan.chunks.rows else "decode steps"].append(i)
    # The steps in the middle of the run, where the rows are taken.
    chosen = {kind: steps[len(steps) // 2 :][:_NUM_STEPS] for kind, steps in kinds.items() if steps}
    profiled = {i: _Profiled() for steps in chosen.values() for i in steps}
    runner.join(pb.Joined(generation=recording.generation))
    for i, frame in enumerate(recording.frames):
        with profiled.get(i, contextlib.nullcontext()):
            replay.step(runner, frame)
    found: dict[str, Any] = {}
    for kind, steps in chosen.items():
        seconds = sum(spans[i][1] - spans[i][0] for i in steps)
        found[kind] = {
            "steps": len(steps),
            "step_ms": 1e3 * seconds / len(steps),
            "tokens": fmean(_num_tokens(recording.frames[i]) for i in steps),
            **_shares([profiled[i] for i in steps], seconds),
        }
    return found


class _Profiled:
    """One profiled step."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self.groups: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = [event for event in self._profile.events() or [] if event.name != "PyTorch Profiler"]
        last = max((event.time_range.end for event in events if _own_group(event.name) == "linears"), default=math.inf)
        for event in events:
            # What follows the last matrix of the model makes tokens of its logits.
            group = _SAMPLING if event.time_range.start >= last else _group(event)
            self.groups[group] += event.self_cpu_time_total
            self.operators[f"{group}: {event.name}"] += event.self_cpu_time_total


def _own_group(name: str) -> str | None:
    return next((group for group, pattern in _GROUPS if pattern.search(name)), None)


def _group(event: FunctionEvent | None) -> str:
    """Returns the group of the operator, or of the innermost caller that has one."""
    while event is not None:
        if group := _own_group(event.name):
            return group
        event = event.cpu_parent
    return _SMALL


def _num_tokens(frame: bytes) -> int:
    plan = parse_frame(frame).plan
    return len(plan.decode_rows) // 4 + sum(memoryview(plan.chunks.counts).cast("i"))


def _shares(steps: Iterable[_Profiled], seconds: float) -> dict[str, Any]:
    groups: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for step in steps:
        groups.update(step.groups)
        operators.update(step.operators)
    shares = {name: micros * 1e-6 / seconds for name, micros in groups.items()}
    shares[_HOST] = 1 - sum(shares.values())
    largest = {name: micros * 1e-6 / seconds for name, micros in operators.most_common(_NUM_LARGEST)}
    return {"shares": shares, "largest": largest}
