"""The lab's figures as text: tables, and one line to paste. Owns the wording, computes no figure."""

from collections.abc import Callable, Sequence

from scheduler_svc.simulator.memory.charts.figures import Figures
from scheduler_svc.simulator.memory.comparison import Comparison
from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.settings import Settings

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def size(count: float) -> str:
    """Formats bytes in the unit that keeps the number below 1,024."""
    value, unit = in_unit(count)
    return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"


def in_unit(count: float) -> tuple[float, str]:
    """Returns bytes as a number below 1,024 and its unit."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return count, unit
        count /= 1024
    return count, _UNITS[-1]


def scaled(count: float, unit: str) -> str:
    """Formats a count in thousands, millions and so on of its unit."""
    for prefix in _THOUSANDS[:-1]:
        if abs(count) < 1000:
            return f"{count:,.1f} {prefix}{unit}"
        count /= 1000
    return f"{count:,.1f} {_THOUSANDS[-1]}{unit}"


def percent(share: float) -> str:
    """Formats a share, in whole percent from 10 on."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def heading(settings: Settings, geometry: Geometry) -> list[str]:
    """Describes the run in two lines."""
    memory = settings.memory_tokens
    sharing = (
        f"; {settings.prefix_groups:,} shared prefixes of {settings.prefix_length:,} tokens"
        if settings.prefix_groups and settings.prefix_length
        else "; no shared prefixes"
    )
    samples = f" with {settings.samples} samples" if settings.samples > 1 else ""
    window = f"; attention window of {settings.window:,} tokens" if settings.window is not None else ""
    return [
        f"{settings.sequences // settings.samples:,} clients, {settings.lives:,} requests each{samples}; sequences of "
        f"{settings.min_length:,} to {settings.max_length:,} tokens, {percent(settings.prompt_share)} of them "
        f"prompt{sharing}{window}; seed {settings.seed}",
        f"memory of {memory:,} tokens, {size(memory * geometry.token_bytes)} for {geometry.model.name} "
        f"({size(geometry.token_bytes)} per token); longest sequence served {settings.reserve:,} tokens; "
        f"pages of {settings.page_size} tokens",
    ]


_COST_COLUMNS: str = "tokens (prompt)|last token|without cache|all tokens|without cache|ratio|bytes|without cache"

Row = tuple[str, Callable[[Figures], str]]


def _of_tokens(tokens: Callable[[Figures], float]) -> Callable[[Figures], str]:
    return lambda figures: f"{tokens(figures):,.0f}  {size(tokens(figures) * figures.token_bytes)}"


_ROWS: tuple[Row | None, ...] = (
    ("would fit at full length", lambda f: f"{f.fit_sequences:,}"),
    ("running, mean / peak", lambda f: f"{f.running_mean:,.1f} / {f.running_peak:,}"),
    ("steps in all", lambda f: f"{f.steps:,}"),
    ("tokens per step", lambda f: f"{f.decoded_per_step:,.1f}"),
    ("rejected / queued", lambda f: f"{f.rejected:,} / {f.delayed:,}"),
    ("steps in the queue, mean / p99", lambda f: f"{f.wait_mean_steps:,.0f} / {f.wait_p99_steps:,.0f}"),
    ("preemptions", lambda f: f"{f.preemptions:,}"),
    ("tokens recomputed", lambda f: f"{f.recomputed_tokens:,}"),
    None,
    ("used, mean", _of_tokens(lambda f: f.used_mean_tokens)),
    ("used, peak", _of_tokens(lambda f: f.used_peak_tokens)),
    ("reserved, mean", _of_tokens(lambda f: f.reserved_mean_tokens)),
    ("reserved and empty, mean", _of_tokens(lambda f: f.wasted_mean_tokens)),
    ("free, mean", _of_tokens(lambda f: f.free_mean_tokens)),
    ("utilisation, mean / peak", lambda f: f"{percent(f.utilisation_mean)} / {percent(f.utilisation_peak)}"),
    ("internal fragmentation", lambda f: percent(f.internal_fragmentation)),
    (
        "external fragmentation, mean / peak",
        lambda f: f"{percent(f.external_fragmentation)} / {percent(f.external_fragmentation_peak)}",
    ),
    ("no room though enough was free", lambda f: f"{f.refused_by_fragmentation:,}"),
    None,
    ("saved by sharing, mean", _of_tokens(lambda f: f.saved_mean_tokens)),
    ("saved by sharing, peak", _of_tokens(lambda f: f.saved_peak_tokens)),
    ("cached tokens of those admitted", lambda f: f"{f.hit_tokens:,} of {f.prefill_tokens:,}"),
    ("copies", lambda f: f"{f.moves:,}"),
    ("tokens copied", _of_tokens(lambda f: f.moved_tokens)),
    ("K/V read per step", lambda f: size(f.read_per_step_bytes)),
    None,
    ("admission, median / p99 µs", lambda f: f"{f.allocate.median_us:.2f} / {f.allocate.p99_us:.2f}"),
    ("next token, median / p99 µs", lambda f: f"{f.grow.median_us:.2f} / {f.grow.p99_us:.2f}"),
    ("hashing, median / p99 µs", lambda f: f"{f.prepare.median_us:.2f} / {f.prepare.p99_us:.2f}"),
)


def layouts_table(runs: Sequence[Figures]) -> list[str]:
    """Returns a table with a column per layout."""
    rows = [["memory layout", *(run.memory for run in runs)]]
    rows += [[row[0], *map(row[1], runs)] if row else [] for row in _ROWS]
    return [
        *_aligned(rows),
        "µs are measured times of this Python code on this machine. Hashing happens once, when a sequence arrives.",
        "Means leave out the end of the run, where no sequence waits and clients have no more requests.",
    ]


def comparison_tables(comparison: Comparison, geometry: Geometry) -> list[str]:
    """Compares generation without a cache and with one, and shows what each window saves."""
    rows = [_COST_COLUMNS.split("|")]
    for at in comparison.lengths:
        costs = (at.token_cached, at.token_recomputed, at.total_cached, at.total_recomputed)
        flops = [scaled(cost.flops, "FLOP") for cost in costs]
        sizes = [size(cost.bytes) for cost in costs[2:]]
        rows.append([f"{at.length:,} ({at.prompt:,})", *flops, f"{at.flops_ratio:,.1f} ×", *sizes])
    lines = [
        f"FLOPs and bytes with and without a cache: {geometry.model.name}, one sequence alone, exact arithmetic",
        *_aligned(rows),
    ]
    rows = [["window", "K/V read per token", "with the window", "saved"]]
    for window in comparison.windows:
        rows.append([f"{window.window:,}", size(window.full_bytes), size(window.bytes), percent(window.saved)])
    if comparison.windows:
        lines += ["", "K/V that attention reads with a window, mean over the workload", *_aligned(rows)]
    return lines


def summary(settings: Settings, geometry: Geometry, runs: Sequence[Figures], comparison: Comparison) -> str:
    """Describes the run and its main figures in one line."""
    parts = [
        f"{run.memory} {run.running_mean:,.1f} running, {percent(run.utilisation_mean)} used, {run.steps:,} steps"
        for run in runs
    ]
    saved = max(run.saved_mean_tokens for run in runs) * geometry.token_bytes
    last = comparison.lengths[-1]
    return " · ".join(
        [
            f"KV cache of {size(settings.memory_tokens * geometry.token_bytes)} ({geometry.model.name}), "
            f"{settings.sequences * settings.lives:,} sequences of {settings.min_length:,} to {settings.max_length:,} "
            f"tokens, seed {settings.seed}",
            *parts,
            *([f"sharing saves {size(saved)}"] if saved else []),
            f"{last.length:,} tokens without a cache take {last.flops_ratio:,.0f} × the FLOPs",
        ]
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the first column left and the others right. A row without cells is an empty line."""
    widths = [max(map(len, column)) for column in zip(*filter(None, rows), strict=True)]
    sides = "<" + ">" * len(widths)
    # An empty row has fewer cells than there are widths.
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)] for row in rows]
    return ["   ".join(row).rstrip() for row in cells]
