"""The bars of the core's cost: the limit of each figure.

Owns the limits. Does not know how a figure is measured.
"""

from collections.abc import Sequence
from typing import Any

STEP_ROWS, STEP_US = 1024, 500.0
PLAN_BYTES, BYTES_PER_ROW = 4096, 4
ADMIT_COLD_US = 200.0
WAITING_ADDS = 0.05
GROWTH_ROWS, GROWTH = 4096, 4.5


def judged(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one object per bar that the lines have figures for; the worst line counts."""
    by_rows = {line["rows"]: line for line in lines}
    bars: list[dict[str, Any]] = []

    def hold(bar: str, value: float, limit: float) -> None:
        bars.append({"bar": bar, "value": value, "limit": limit, "met": value <= limit})

    at = by_rows.get(STEP_ROWS)
    if at is not None:
        hold(f"{STEP_ROWS} rows: at most {STEP_US:.0f} us per step", at["step_us"], STEP_US)
    beside = max(line["plan_bytes_most"] - BYTES_PER_ROW * line["rows"] for line in lines)
    hold(f"a plan: at most {PLAN_BYTES} bytes plus {BYTES_PER_ROW} per row", beside, PLAN_BYTES)
    cold = max(line["admit_cold_us"] for line in lines)
    hold(f"cold admission: at most {ADMIT_COLD_US:.0f} us", cold, ADMIT_COLD_US)
    adds = max(line["waiting_adds"] for line in lines)
    hold(f"10000 waiting: a step costs at most {WAITING_ADDS:.0%} more", adds, WAITING_ADDS)
    many = by_rows.get(GROWTH_ROWS)
    if at is not None and many is not None:
        growth = many["step_us"] / at["step_us"]
        hold(f"{GROWTH_ROWS} rows: at most {GROWTH} times a step of {STEP_ROWS}", growth, GROWTH)
    return bars


def verdict(bar: dict[str, Any]) -> str:
    """Returns a bar as text."""
    return f"{bar['bar']}: {bar['value']:.4g}, {'met' if bar['met'] else 'MISSED'}"
