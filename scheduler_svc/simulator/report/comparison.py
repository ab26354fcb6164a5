"""The same requests under each value of one policy, side by side.

Owns which policies can be compared and which figures tell them apart.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduler_svc.core.messages.config import Admission
from scheduler_svc.simulator.report.tables import Figures, duration

# Flags and their values, the default first.
POLICIES: Mapping[str, tuple[object, ...]] = {
    "mixed-steps": (True, False),
    "admission": tuple(Admission),
    "cache-aware": (True, False),
    "fair-share": (True, False),
    "prefix-sharing": (True, False),
}
_LABEL, _COLUMN = 22, 14


def variants(args: argparse.Namespace) -> list[tuple[str, argparse.Namespace]]:
    """A name and the flags of each run."""
    name = args.compare
    made: list[tuple[str, argparse.Namespace]] = []
    for value in POLICIES[name]:
        flags = argparse.Namespace(**{**vars(args), name.replace("-", "_"): value})
        made.append(((name if value else f"no {name}") if isinstance(value, bool) else str(value), flags))
    return made


def comparison_table(columns: Sequence[tuple[str, Figures]]) -> str:
    """A line per figure, a column per variant; the change against the first stands behind each other."""
    lines = [" " * _LABEL + "".join(f"{name:>{_COLUMN}}{'':8}" for name, _ in columns)]
    for label, path, shown in _rows(columns[0][1]):
        values = [_figure(figures, path) for _, figures in columns]
        cells = [f"{shown(each):>{_COLUMN}}{_change(values[0], each) if i else '':>8}" for i, each in enumerate(values)]
        lines.append(f"{label:{_LABEL}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


# A label, where the figure stands, how it is shown.
_Row = tuple[str, tuple[str, ...], Callable[[float], str]]


def _rows(figures: Figures) -> list[_Row]:
    rows: list[_Row] = [
        ("requests/s", ("throughput", "requests_per_second"), _two_digits),
        ("tokens/s out", ("throughput", "output_tokens_per_second"), _whole),
        *((f"TTFT {key}", ("ttft_seconds", key), duration) for key in ("p50", "p90", "p99")),
        *((f"ITL {key}", ("itl_seconds", key), duration) for key in ("p50", "p90", "p99")),
        ("total mean", ("total_seconds", "mean"), duration),
        ("hit rate", ("hit_rate",), _percent),
        ("preemptions", ("preemptions",), _whole),
        ("recomputed tokens", ("waste", "recomputed_tokens"), _whole),
        ("rejected", ("requests", "rejected"), _whole),
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


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _two_digits(value: float) -> str:
    return f"{value:,.2f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"
