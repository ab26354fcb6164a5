"""The bars of the core's cost: the limit of each figure.

Owns the limits. Does not know how a figure is measured.
"""

from collections.abc import Sequence
from typing import Any

from tests.measure.harness import Bar

STEP_ROWS, STEP_US = 1024, 500.0
PLAN_BYTES, BYTES_PER_ROW = 4096, 4
ADMIT_COLD_US = 200.0
WAITING_ADDS = 0.05
GROWTH_ROWS, GROWTH = 4096, 4.5


def judged(lines: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the bars that the lines have figures for; the worst line counts."""
    by_rows = {line["rows"]: line for line in lines}
    at, many = by_rows.get(STEP_ROWS), by_rows.get(GROWTH_ROWS)
    beside = max(line["plan_bytes_most"] - BYTES_PER_ROW * line["rows"] for line in lines)
    cold = max(line["admit_cold_us"] for line in lines)
    adds = max(line["waiting_adds"] for line in lines)
    bars = [] if at is None else [Bar(name=f"us per step of {STEP_ROWS} rows", value=at["step_us"], limit=STEP_US)]
    bars += [
        Bar(name=f"bytes of a plan beside {BYTES_PER_ROW} per row", value=beside, limit=PLAN_BYTES),
        Bar(name="us of a cold admission", value=cold, limit=ADMIT_COLD_US),
        Bar(name="share that 10,000 waiting requests add to a step", value=adds, limit=WAITING_ADDS),
    ]
    if at is not None and many is not None:
        name = f"a step of {GROWTH_ROWS} rows, of one of {STEP_ROWS}"
        bars.append(Bar(name=name, value=many["step_us"] / at["step_us"], limit=GROWTH))
    return bars
