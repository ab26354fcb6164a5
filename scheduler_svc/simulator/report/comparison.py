"""The table of `--compare`: the same requests under each value of one policy, side by side.

Owns which figures are compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

from scheduler_svc.simulator.report.tables import Figures, duration

_LABEL, _COLUMN = 22, 14
# A label, the keys of the figure, its format.
_Row = tuple[str, tuple[str, ...], Callable[[float], str]]


def comparison_table(columns: Sequence[tuple[str, Figures]]) -> str:
    """Returns a line per figure and a column per variant, with the change against the first variant."""
    lines = [" " * _LABEL + "".join(f"{name:>{_COLUMN}}{'':8}" for name, _ in columns)]
    for label, path, shown in _rows(columns[0][1]):
        values = [_figure(figures, path) for _, figures in columns]
        cells = [f"{shown(each):>{_COLUMN}}{_change(values[0], each) if i else '':>8}" for i, each in enumerate(values)]
        lines.append(f"{label:{_LABEL}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _rows(figures: Figures) -> list[_Row]:
    whole, percent = "{:,.0f}".format, "{:.1%}".format
    rows: list[_Row] = [
        ("requests/s", ("throughput", "requests_per_second"), "{:,.2f}".format),
        ("tokens/s out", ("throughput", "output_tokens_per_second"), whole),
        *((f"TTFT {key}", ("ttft_seconds", key), duration) for key in ("p50", "p90", "p99")),
        *((f"ITL {key}", ("itl_seconds", key), duration) for key in ("p50", "p90", "p99")),
        ("total mean", ("total_seconds", "mean"), duration),
        ("hit rate", ("hit_rate",), percent),
        ("preemptions", ("preemptions",), whole),
        ("recomputed tokens", ("waste", "recomputed_tokens"), whole),
        ("rejected", ("requests", "rejected"), whole),
    ]
    for group in ("first_tenant", "other_tenants"):
        if group in figures:
            label = group.split("_")[0]
            rows += [(f"{label} TTFT {key}", (group, "ttft_seconds", key), duration) for key in ("p50", "p90", "p99")]
    return rows


def _figure(figures: Figures, path: Sequence[str]) -> float:
    value: Any = figures
    for key in path:
        value = value[key]
    return float(value)


def _change(base: float, value: float) -> str:
    return f"{value / base - 1:+.0%}" if base else ""
