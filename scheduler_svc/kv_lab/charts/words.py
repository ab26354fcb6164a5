"""The lab's figures as text: a table per question, and one line that can be pasted. Owns the wording, no figure."""

from collections.abc import Callable, Sequence

from scheduler_svc.kv_lab.charts.figures import Figures
from scheduler_svc.kv_lab.comparison import Comparison
from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.settings import Settings

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def size(count: float) -> str:
    """Bytes in the unit that keeps the number below 1,024."""
    value, unit = in_unit(count)
    return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"


def in_unit(count: float) -> tuple[float, str]:
    """Bytes as a number and the unit that keeps it below 1,024."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return count, unit
        count /= 1024
    return count, _UNITS[-1]


def scaled(count: float, unit: str) -> str:
    """A count in thousands, millions and so on of its unit."""
    for prefix in _THOUSANDS[:-1]:
        if abs(count) < 1000:
            return f"{count:,.1f} {prefix}{unit}"
        count /= 1000
    return f"{count:,.1f} {_THOUSANDS[-1]}{unit}"


def percent(share: float) -> str:
    """A share, in whole percent from 10 on."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def heading(settings: Settings, geometry: Geometry) -> list[str]:
    """What the figures are of."""
    memory = settings.memory_tokens
    sharing = (
        f"; {settings.prefix_groups:,} prefixes of {settings.prefix_length:,} tokens"
        if settings.prefix_groups and settings.prefix_length
        else "; no common prefixes"
    )
    samples = f", {settings.samples} samples of each prompt" if settings.samples > 1 else ""
    window = f"; a window of {settings.window:,} tokens" if settings.window is not None else ""
    return [
        f"{settings.sequences:,} sequences at once, {settings.lives:,} after each other in every place, "
        f"{settings.min_length:,} to {settings.max_length:,} tokens each, {percent(settings.prompt_share)} of them "
        f"prompt{sharing}{samples}{window}; seed {settings.seed}",
        f"memory of {memory:,} tokens, {size(memory * geometry.token_bytes)} of {geometry.name} "
        f"({size(geometry.token_bytes)} each); at most {settings.reserve:,} tokens are served; "
        f"pages of {settings.page_size}",
    ]


Row = tuple[str, Callable[[Figures], str]]


def _of_tokens(tokens: Callable[[Figures], float]) -> Callable[[Figures], str]:
    return lambda figures: f"{tokens(figures):,.0f}  {size(tokens(figures) * figures.token_bytes)}"


_ROWS: tuple[Row | None, ...] = (
    ("sequences that fit, whole", lambda f: f"{f.fit_sequences:,}"),
    ("run at once, mean / peak", lambda f: f"{f.running_mean:,.1f} / {f.running_peak:,}"),
    ("steps until all have ended", lambda f: f"{f.steps:,}"),
    ("tokens per step", lambda f: f"{f.decoded_per_step:,.1f}"),
    ("rejected / had to wait", lambda f: f"{f.rejected:,} / {f.delayed:,}"),
    ("steps of waiting, mean / p99", lambda f: f"{f.wait_mean_steps:,.0f} / {f.wait_p99_steps:,.0f}"),
    ("preempted", lambda f: f"{f.preemptions:,}"),
    ("tokens computed again", lambda f: f"{f.recomputed_tokens:,}"),
    None,
    ("used, mean", _of_tokens(lambda f: f.used_mean_tokens)),
    ("used, peak", _of_tokens(lambda f: f.used_peak_tokens)),
    ("reserved, mean", _of_tokens(lambda f: f.reserved_mean_tokens)),
    ("reserved and empty, mean", _of_tokens(lambda f: f.wasted_mean_tokens)),
    ("free, mean", _of_tokens(lambda f: f.free_mean_tokens)),
    ("utilisation, mean / peak", lambda f: f"{percent(f.utilisation_mean)} / {percent(f.utilisation_peak)}"),
    ("internal fragmentation", lambda f: percent(f.internal_fragmentation)),
    (
        "external, mean / peak",
        lambda f: f"{percent(f.external_fragmentation)} / {percent(f.external_fragmentation_peak)}",
    ),
    ("refused though free in total", lambda f: f"{f.refused_by_fragmentation:,}"),
    None,
    ("saved by sharing, mean", _of_tokens(lambda f: f.saved_mean_tokens)),
    ("saved by sharing, peak", _of_tokens(lambda f: f.saved_peak_tokens)),
    ("admitted tokens found", lambda f: f"{f.hit_tokens:,} of {f.prefill_tokens:,}"),
    ("copied, times", lambda f: f"{f.moves:,}"),
    ("copied", _of_tokens(lambda f: f.moved_tokens)),
    ("K/V read per step", lambda f: size(f.read_per_step_bytes)),
    None,
    ("allocate, median / p99 µs", lambda f: f"{f.allocate.median_us:.2f} / {f.allocate.p99_us:.2f}"),
    ("one token, median / p99 µs", lambda f: f"{f.grow.median_us:.2f} / {f.grow.p99_us:.2f}"),
    ("hashing, median / p99 µs", lambda f: f"{f.prepare.median_us:.2f} / {f.prepare.p99_us:.2f}"),
)


def layouts_table(runs: Sequence[Figures]) -> list[str]:
    """A column per layout."""
    rows: list[list[str] | None] = [["tokens and their bytes", *(run.memory for run in runs)]]
    rows += [None if row is None else [row[0], *(row[1](run) for run in runs)] for row in _ROWS]
    return [
        *_aligned(rows),
        "µs are measured, of this lab's Python on this machine, the clock's own cost of a call among them; hashing is",
        "done once when a sequence arrives. Means leave out the end, in which nobody waits and places stay empty.",
    ]


def comparison_tables(comparison: Comparison, geometry: Geometry) -> list[str]:
    """Compares generation without a cache and with one, and shows what each window saves."""
    rows: list[list[str] | None] = [
        ["tokens (prompt)", "last token", "without cache", "all", "without cache", "ratio", "bytes", "without cache"]
    ]
    for at in comparison.lengths:
        rows.append(
            [
                f"{at.length:,} ({at.prompt:,})",
                scaled(at.token_cached.flops, "FLOP"),
                scaled(at.token_recomputed.flops, "FLOP"),
                scaled(at.total_cached.flops, "FLOP"),
                scaled(at.total_recomputed.flops, "FLOP"),
                f"{at.flops_ratio:,.1f} ×",
                size(at.total_cached.bytes),
                size(at.total_recomputed.bytes),
            ]
        )
    lines = [f"No cache against a cache, {geometry.name}, one sequence alone, exact arithmetic", *_aligned(rows)]
    rows = [["window", "K/V read per token", "with the window", "left out"]]
    for window in comparison.windows:
        rows.append([f"{window.window:,}", size(window.full_bytes), size(window.bytes), percent(window.saved)])
    if comparison.windows:
        lines += ["", "What a window leaves out of attention's reading, mean over the workload", *_aligned(rows)]
    return lines


def summary(settings: Settings, geometry: Geometry, runs: Sequence[Figures], comparison: Comparison) -> str:
    """One line that stands alone."""
    parts = [
        f"{run.memory} {run.running_mean:,.1f} at once, {percent(run.utilisation_mean)} used, {run.steps:,} steps"
        for run in runs
    ]
    saved = max(run.saved_mean_tokens for run in runs) * geometry.token_bytes
    last = comparison.lengths[-1]
    return " · ".join(
        [
            f"KV cache of {size(settings.memory_tokens * geometry.token_bytes)} ({geometry.name}), "
            f"{settings.sequences * settings.lives:,} sequences of {settings.min_length:,} to {settings.max_length:,} "
            f"tokens, seed {settings.seed}",
            *parts,
            *([f"sharing saves {size(saved)}"] if saved else []),
            f"{last.length:,} tokens without a cache take {last.flops_ratio:,.0f} × the FLOPs",
        ]
    )


def _aligned(rows: Sequence[Sequence[str] | None]) -> list[str]:
    """Columns to the right, the first to the left; None is an empty line."""
    cells = [row for row in rows if row is not None]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines: list[str] = []
    for row in rows:
        if row is None:
            lines.append("")
            continue
        first, rest = (
            row[0].ljust(widths[0]),
            (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        )
        lines.append("   ".join([first, *rest]).rstrip())
    return lines
