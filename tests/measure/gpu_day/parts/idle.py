"""How long the device has nothing to do between steps, for the runner alone and with two plans in flight.

Each outcome has the device's time from the first to the last operation of its step; what the wall shows beyond their
sum is idle. Gaps inside a step, which eager launches leave, count as the step's own time.
"""

from tests.measure.gpu_day import published, workloads
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.recorded_plans import record_plans, replay
from tests.measure.gpu_day.runners import warm
from tests.measure.gpu_day.synthetic_plans import Generations, decode_plans

_SIZES = {"max_rows": 256, "max_length": 2048, "token_budget": 4096}
_ROWS = (1, 16, 64, 256)
_STEPS = 200
_CONTEXT = 500


def run(day: Day) -> None:
    """Steady decode steps of several widths, then nano-vllm's workload."""
    served = warm(day, "Qwen3-0.6B", _SIZES)
    generations = Generations()
    context, steps = (20, 20) if day.tiny else (_CONTEXT, _STEPS)
    rows = []
    for num_rows in (1, 4) if day.tiny else _ROWS:
        plans = decode_plans(served.geometry, rows=num_rows, context=context, steps=steps)
        with day.phase(f"{num_rows} rows"):
            for in_flight in (1, 2):
                one = replay(served.runner, plans, generation=generations.next(), in_flight=in_flight)
                idle = 1 - one.compute_seconds / one.seconds
                rows.append([num_rows, in_flight, 1e3 * one.seconds / steps, 100 * idle])
                columns = ["rows", "plans in flight", "wall ms per step", "idle %"]
                day.record.table("Steady decode steps", columns, rows, Kind.MEASURED)
    requests = workloads.tiny() if day.tiny else workloads.nano_vllm()
    with day.phase("nano-vllm's workload"):
        one = replay(served.runner, record_plans(served.geometry, requests), generation=generations.next())
    day.record.check("every token was sampled", one.num_tokens == requests.num_output_tokens)
    day.record.figure("idle on nano-vllm's workload", 1 - one.compute_seconds / one.seconds, "of the wall time")
    day.record.figure("aim", published.AIM_IDLE_SHARE, "of the wall time", Kind.AIM)
