"""Pages between the pool and host memory: bytes per second each way, and what they cost a decode step beside them."""

import statistics

import numpy as np

from gpu_worker.wire.frames import Plan
from gpu_worker.wire.page_orders import PageOrders
from tests.gpu_worker.plans import Moves
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.recorded_plans import replay
from tests.measure.gpu_day.runners import Served, warm
from tests.measure.gpu_day.synthetic_plans import Generations, decode_plans

_SIZES = {"max_rows": 64, "max_length": 1024, "token_budget": 1024, "num_pages": 700}
_HOST_BYTES = 4 << 30
_COUNTS = (1, 4, 16, 64)
_ROWS, _CONTEXT = 64, 500
_REPEATS = 5
_SAVED_PER_STEP = (0, 1, 4)


def run(day: Day) -> None:
    """First the copies alone, then beside decode steps."""
    served = warm(day, "Qwen3-0.6B", _SIZES, host_pool_bytes=1 << 20 if day.tiny else _HOST_BYTES)
    page_bytes = served.runner.on_device.cache.page_elements * served.dtype.itemsize
    day.record.figure("a page of all layers", page_bytes / 1e6, "MB", Kind.COUNTED)
    _alone(day, served, page_bytes)
    _beside_steps(day, served)


def _alone(day: Day, served: Served, page_bytes: int) -> None:
    rows = []
    for count in (1, 4) if day.tiny else _COUNTS:
        pages, slots = np.arange(1, count + 1), np.arange(count)
        orders = {
            "saves": PageOrders(saved_pages=pages, saved_slots=slots),
            "loads": PageOrders(loaded_pages=pages, loaded_slots=slots),
        }
        plans = [Plan(generation=0, step=i, checksum=0, page_orders=each) for i, each in enumerate(orders.values(), 1)]
        with day.phase(f"{count} pages"):
            # The first touches fresh host memory.
            runs = [served.runner.rehearse(*plans) for _ in range(_REPEATS + 1)][1:]
        for i, way in enumerate(orders):
            micros = statistics.median(outcomes[i].compute_us for outcomes in runs)
            rows.append([way, count, micros / 1e3, count * page_bytes / max(1.0, micros) / 1e3])
        columns = ["way", "pages", "ms", "GB/s"]
        day.record.table("Pages to and from host memory", columns, rows, Kind.MEASURED)


def _beside_steps(day: Day, served: Served) -> None:
    """Decode steps that each save pages against steps that save none."""
    generations = Generations()
    num_rows, context, steps = (4, 20, 8) if day.tiny else (_ROWS, _CONTEXT, 60)
    tokens: dict[int, list[list[int]]] = {}
    rows = []
    for saved in _SAVED_PER_STEP:
        with day.phase(f"{saved} saves beside each decode step"):
            wall_ms = list[float]()
            for _ in range(_REPEATS):
                plans = decode_plans(served.geometry, rows=num_rows, context=context, steps=steps)
                for plan in plans:
                    if saved:
                        Moves(saves=[(page, page - 1) for page in range(1, saved + 1)]).write(plan)
                one = replay(served.runner, plans, generation=generations.next())
                wall_ms.append(1e3 * one.seconds / steps)
        tokens[saved] = one.tokens()
        rows.append([saved, statistics.median(wall_ms), min(wall_ms), max(wall_ms)])
        columns = ["pages saved per step", "wall ms per step", "least", "most"]
        day.record.table("Decode steps beside saves", columns, rows, Kind.MEASURED)
    same = all(found == tokens[0] for found in tokens.values())
    day.record.check("saves change no token", same, f"{sum(map(len, tokens[0]))} tokens")
