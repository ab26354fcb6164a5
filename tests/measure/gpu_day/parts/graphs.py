"""The same plans with captured graphs and without: equal tokens, equal logits.

The plans are the core's for a mixed load, so that decode buckets, prompts and mixed steps all occur; one load is
greedy, one draws by temperature.
"""

from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.wire.frames import Outcome
from tests.measure.gpu_day import workloads
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.recorded_plans import record_plans, replay
from tests.measure.gpu_day.runners import Served, free_memory, warm
from tests.measure.gpu_day.workloads import Requests

_SIZES = {"max_rows": 64, "max_length": 1024, "token_budget": 2048, "num_pages": 400}
_TEMPERATURES = (0.0, 0.6)


def run(day: Day) -> None:
    """Runs the plans eagerly first, then with graphs, and compares."""
    loads = [_load(day, temperature) for temperature in _TEMPERATURES]
    results = {}
    for graphs in (False, True):
        with day.phase("with graphs" if graphs else "eager"):
            results[graphs] = _tokens_and_logits(day, loads, graphs=graphs)
    for i, temperature in enumerate(_TEMPERATURES):
        (eager, eager_logits), (captured, captured_logits) = results[False][i], results[True][i]
        name = f"temperature {temperature:g}"
        differing = [step for step, pair in enumerate(zip(eager, captured, strict=True)) if pair[0] != pair[1]]
        detail = f"{sum(map(len, eager))} tokens of {len(eager)} steps"
        if differing:
            detail += f"; step {differing[0]} is the first of {len(differing)} that differ"
        day.record.check(f"{name}: tokens with graphs equal those without", not differing, detail)
        errors = [
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(eager_logits, captured_logits, strict=True)
        ]
        day.record.check(
            f"{name}: logits with graphs equal those without",
            bool(errors) and max(errors) == 0,
            f"{len(errors)} steps, largest relative difference {max(errors, default=float('nan')):.2g}",
        )


def _load(day: Day, temperature: float) -> Requests:
    requests = workloads.tiny() if day.tiny else workloads.nano_vllm()
    count = len(requests.prompts) if day.tiny else 80
    return Requests(
        prompts=[prompt[:600] for prompt in requests.prompts[:count]],
        output_lengths=[min(length, 120) for length in requests.output_lengths[:count]],
        temperature=temperature,
    )


def _tokens_and_logits(day: Day, loads: list[Requests], *, graphs: bool) -> list[tuple[list[list[int]], list[Tensor]]]:
    """For each load every step's tokens, with two plans in flight; and logits of every step, one at a time."""
    served = warm(day, "Qwen3-0.6B", _SIZES, graphs=graphs)
    if graphs:
        steps = served.runner.steps
        num_shapes, num_graphs = len(steps.shapes.steps), steps.graphs.num_graphs
        day.record.figure("graphs", num_graphs, f"of {num_shapes} shapes", Kind.COUNTED)
        day.record.check("every shape has a graph", num_graphs == num_shapes)
    results = []
    for number, requests in enumerate(loads):
        plans = record_plans(served.geometry, requests)
        tokens = replay(served.runner, plans, generation=2 * number + 1).tokens()
        results.append((tokens, _logits(served, plans[: max(1, len(plans) // 4)], 2 * number + 2)))
    del served
    free_memory(day.device)
    return results


def _logits(served: Served, plans: list[pb.StepPlan], generation: int) -> list[Tensor]:
    seen: list[Tensor] = []

    def keep(outcome: Outcome) -> None:
        if outcome.tokens.size:
            # The next step overwrites them.
            seen.append(served.runner.on_device.last_logits[: outcome.tokens.size].cpu().clone())

    replay(served.runner, plans, generation=generation, in_flight=1, on_step=keep)
    return seen
