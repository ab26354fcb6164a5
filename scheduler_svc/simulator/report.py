"""The figures of a simulation: as JSON, as a table, as one line to paste, and those of `--compare` side by side.

Owns the names and units of the figures. Setup, workload and seed alone decide them: none is a wall time.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, cast

from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.tally import Histogram, Latencies
from tandem_contract.plural import counted, numbered

Figures = dict[str, Any]

_PERCENTS = (50, 90, 99)
# Only 0 is blank.
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 48
# A core that is busy for longer than this lets its workers wait.
_FULL_CORE = 0.9


def figures_of(simulation: Simulation, setup: Setup) -> Figures:
    """Returns the figures as `--json` prints them, in seconds, tokens and pages. Shares are 0 to 1."""
    tally, workers = simulation.tally, list(simulation.workers.values())
    seconds = max(0.0, tally.last_at - tally.first_at)
    padding = sum(worker.padding_tokens for worker in workers)
    used, cached, running = tally.means()
    load = simulation.load
    pages = setup.info.usable_pages * len(workers)
    figures: Figures = {
        "seconds": seconds,
        "requests": {"submitted": tally.submitted, "finished": tally.finished, "rejected": tally.rejected},
        "ends": dict(sorted(tally.ends.items())),
        "throughput": {
            "requests_per_second": _share(tally.finished, seconds),
            "input_tokens_per_second": _share(tally.prompt_tokens, seconds),
            "output_tokens_per_second": _share(tally.output_tokens, seconds),
        },
        **_latencies(tally.all_requests),
        "pages": {
            "total": pages,
            "page_size": setup.info.page_size,
            "used_mean": used,
            "used_max": tally.pages_used_max,
            "cached_mean": cached,
            "held_max": tally.pages_held_max,
        },
        "hit_rate": _share(tally.cached_tokens, tally.prompt_tokens),
        "cached_prompt_tokens": tally.cached_tokens,
        "preemptions": load.preemptions if load else 0,
        "preempted_requests": tally.preempted_requests,
        "waste": {
            "computed_tokens": padding + sum(worker.wanted_tokens for worker in workers),
            "recomputed_tokens": tally.recomputed_tokens,
            "discarded_tokens": tally.discarded_tokens,
            "padding_tokens": padding,
        },
        "steps": sum(worker.steps for worker in workers),
        "busy": _share(sum(worker.busy_seconds for worker in workers), seconds * len(workers)),
        "running_mean": running,
        "timeline": [[round(at, 6), *load] for at, *load in tally.timeline],
    }
    if len(simulation.cells) > 1 or setup.core_seconds:
        core = [_share(cell.core_seconds, seconds) for cell in simulation.cells]
        figures["cells"] = {"count": len(core), "busiest_core": max(core), "requests": simulation.num_submitted}
    if setup.front_ends:
        fronts = [one for cell in simulation.cells for one in cell.front_ends]
        messages = sum(one.messages for one in fronts)
        figures["front_ends"] = {
            "count": len(fronts),
            "busiest": max(_share(one.busy_seconds, seconds) for one in fronts),
            "tokens_per_message": _share(sum(one.tokens for one in fronts), messages),
        }
    if setup.kill_seconds:
        figures["deaths"] = simulation.num_deaths
    if tally.groups:
        first, others = tally.groups
        figures["first_tenant"], figures["other_tenants"] = _latencies(first), _latencies(others)
    return figures


def _latencies(latencies: Latencies) -> Figures:
    return {f"{name}_seconds": _percentiles(histogram) for name, histogram in vars(latencies).items()}


def _percentiles(histogram: Histogram) -> dict[str, float]:
    percentiles = {f"p{percent}": histogram.percentile(percent) for percent in _PERCENTS}
    return {"mean": histogram.mean, **percentiles, "max": histogram.largest}


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def table(figures: Figures) -> str:
    requests, throughput, pages, waste = (figures[name] for name in ("requests", "throughput", "pages", "waste"))
    computed = waste["computed_tokens"]
    ends = ", ".join(f"{count:,} {reason}" for reason, count in figures["ends"].items())
    tenants = [name for name in ("first_tenant", "other_tenants") if name in figures]
    steps = counted(figures["steps"], "step")
    tokens = {name: waste[f"{name}_tokens"] for name in ("recomputed", "discarded", "padding")}
    parts = ", ".join(f"{name} {count:,} ({_share(count, computed):.1%})" for name, count in tokens.items())
    lines = [
        f"{'':16}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        *_latency_lines(figures),
        *(line for name in tenants for line in _latency_lines(figures[name], f"{name.split('_')[0]} ")[:2]),
        "",
        _line("requests", f"{requests['submitted']:,}: {ends or 'none ended'}"),
        _line("time", f"{figures['seconds']:,.1f} s, {steps}, device busy {figures['busy']:.1%}"),
        _line(
            "throughput",
            f"{throughput['requests_per_second']:,.2f} requests/s, tokens/s: "
            f"{throughput['input_tokens_per_second']:,.0f} in, {throughput['output_tokens_per_second']:,.0f} out",
        ),
        _line(
            "pages",
            f"{pages['total']:,} of {numbered(pages['page_size'], 'token')}; used {pages['used_mean']:,.0f} (mean) "
            f"{pages['used_max']:,} (max), cached {pages['cached_mean']:,.0f} (mean)",
        ),
        _line("hit rate", f"{figures['hit_rate']:.1%} of prompt tokens were cached"),
        _line("preemptions", f"{figures['preemptions']:,} of {counted(figures['preempted_requests'], 'request')}"),
        *_cell_lines(figures),
        _line("running", f"{figures['running_mean']:,.1f} requests (mean)"),
        _line("waste", f"of {counted(computed, 'position')} computed: {parts}"),
        *_over_time(figures),
    ]
    return "\n".join(lines)


def _cell_lines(figures: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if (cells := figures.get("cells")) is not None:
        most = max(cells["requests"]) * cells["count"] / max(1, sum(cells["requests"]))
        busy = cells["busiest_core"]
        verdict = "; it cannot steer its workers" if busy > _FULL_CORE else ""
        lines.append(_line("cells", f"{cells['count']}; requests of the fullest {most:.0%} of the mean"))
        lines.append(_line("core", f"the busiest takes {busy:.1%} of the time{verdict}"))
    if (fronts := figures.get("front_ends")) is not None:
        busy = fronts["busiest"]
        verdict = "; it cannot keep up, so messages become larger" if busy > _FULL_CORE else ""
        per = f"{fronts['tokens_per_message']:.1f} tokens per message"
        lines.append(
            _line("front ends", f"{fronts['count']}; the busiest takes {busy:.1%} of the time, {per}{verdict}")
        )
    if "deaths" in figures:
        lines.append(_line("deaths", f"{counted(figures['deaths'], 'worker', 'were')} killed"))
    return lines


def _latency_lines(figures: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = {"TTFT": "ttft_seconds", "ITL": "itl_seconds", "queue": "queue_seconds", "total": "total_seconds"}
    return [
        f"{prefix + label:16}"
        + "".join(f"{duration(figures[name][key]):>10}" for key in ("mean", "p50", "p90", "p99", "max"))
        for label, name in names.items()
    ]


def _line(label: str, text: str) -> str:
    return f"{label:16}{text}"


def _over_time(figures: Figures) -> list[str]:
    total = figures["pages"]["total"]
    if len(figures["timeline"]) < 2:
        return []
    _, used, cached, _, waiting = zip(*figures["timeline"], strict=True)
    return [
        _line("pages used", _spark(used, total) + f" of {total:,}"),
        _line("pages cached", _spark(cached, total) + f" of {total:,}"),
        _line("waiting", _spark(waiting, max(waiting)) + f" of {max(waiting):,}"),
    ]


def _spark(values: Sequence[int], top: int) -> str:
    """Returns a bar for the largest value of each stretch. `top` is the value of a full bar."""
    width = min(_WIDTH, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    steps = len(_BARS) - 1
    return "".join(_BARS[min(steps, -(-max(part) * steps // top)) if top else 0] for part in parts)


def duration(seconds: float) -> str:
    """Returns three digits and a unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def summary(figures: Figures) -> str:
    """Returns the main figures in one line."""
    ttft, itl, throughput = figures["ttft_seconds"], figures["itl_seconds"], figures["throughput"]
    return (
        f"{throughput['requests_per_second']:.2f} requests/s, "
        f"{throughput['output_tokens_per_second']:.0f} tokens/s out; TTFT p50 {duration(ttft['p50'])} p99 "
        f"{duration(ttft['p99'])}; ITL p50 {duration(itl['p50'])} p99 {duration(itl['p99'])}; hits "
        f"{figures['hit_rate']:.1%}; {numbered(figures['preemptions'], 'preemption')}"
    )


_LABEL, _COLUMN = 22, 14
# A label, the keys of the figure, its format.
_Row = tuple[str, tuple[str, ...], Callable[[float], str]]


def comparison_table(columns: Sequence[tuple[str, Figures]]) -> str:
    """Returns a line per figure and a column per variant, with the change against the first variant."""
    lines = [" " * _LABEL + "".join(f"{name:>{_COLUMN}}{'':8}" for name, _ in columns)]
    for label, path, shown in _rows(columns[0][1]):
        values = [float(reduce(getitem, path, cast(Any, figures))) for _, figures in columns]
        changes = ["", *(f"{value / values[0] - 1:+.0%}" if values[0] else "" for value in values[1:])]
        cells = [f"{shown(value):>{_COLUMN}}{change:>8}" for value, change in zip(values, changes, strict=True)]
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
