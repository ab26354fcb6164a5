"""`tandem simulate --memory …`: its options and what it prints. Owns the options' words; decides no figure."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from scheduler_svc.kv_lab.charts.figures import Figures, figures
from scheduler_svc.kv_lab.charts.words import comparison_tables, heading, layouts_table, summary
from scheduler_svc.kv_lab.comparison import Comparison, compare
from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.layouts.registry import LAYOUTS
from scheduler_svc.kv_lab.run import Life, fit, live
from scheduler_svc.kv_lab.settings import MAX_MEMORY_TOKENS, Settings, SettingsError
from scheduler_svc.kv_lab.workload import draw
from scheduler_svc.simulator.cost.hardware import MODELS, UnknownName, model_named

_MAX_SIZE = 1_048_576
# This program is part of a checkout, never of the wheel.
_INSTALL = "make install"
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One layout's life and what it came to."""

    life: Life
    figures: Figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The lab's options; `run` reads them."""
    preset = Settings()
    parser.add_argument(
        "--memory", choices=[*LAYOUTS, "all"], default="all",
        help="where the K/V stand: fixed reservations, first-fit extents that grow, pages, or pages that are shared",
    )  # fmt: skip
    _whole(parser, "--sequences", preset.sequences, "sequences that want to run at once")
    _whole(parser, "--lives", preset.lives, "sequences that follow one another in each place")
    _whole(parser, "--min-length", preset.min_length, "tokens of the shortest sequence, prompt included")
    _whole(parser, "--max-length", preset.max_length, "tokens of the longest sequence")
    _share(parser, "--prompt-share", preset.prompt_share, "share of a sequence's tokens that is prompt")
    _share(parser, "--gap", preset.gap, "mean steps between the first arrivals")
    _whole(parser, "--reserve", preset.reserve, "longest sequence served: what the contiguous layout reserves")
    memory = parser.add_mutually_exclusive_group()
    _whole(memory, "--memory-tokens", preset.memory_tokens, "memory, in tokens whose K/V it holds")
    memory.add_argument("--memory-gib", type=float, metavar="GIB", help="memory, in GiB of the model's K/V")
    _whole(parser, "--page-size", preset.page_size, "tokens per page")
    _share(parser, "--growth", preset.growth, "the growing layout makes a full extent so many times as large")
    _whole(parser, "--prefix-groups", preset.prefix_groups, "prefixes that prompts begin with; 0: none")
    _whole(parser, "--prefix-length", preset.prefix_length, "tokens of each")
    _whole(parser, "--samples", preset.samples, "sequences that share one prompt")
    parser.add_argument("--window", type=int, metavar="N", help="attention sees the last N tokens; default: all")
    _whole(parser, "--seed", preset.seed, "of everything that is drawn")
    parser.add_argument("--model", default="llama-3.1-8b", help=f"whose K/V: {', '.join(MODELS)} (llama-3.1-8b)")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="in place of the model's")
    _whole(parser, "--element-bytes", 2, "bytes per number, in K/V and weights")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="one object per layout and line, and one of the comparison")


def run(args: argparse.Namespace) -> int:
    """The exit code: 2 for a setting that cannot be, 1 where the picture cannot be drawn or written."""
    try:
        geometry = _geometry(args)
        settings = _settings(args, geometry)
    except (SettingsError, UnknownName) as error:
        return _fail(str(error), 2)
    picture: Path | None = args.png
    if picture is not None and (problem := _cannot_draw(picture)):
        return _fail(problem, 1)
    names = list(LAYOUTS) if args.memory == "all" else [str(args.memory)]
    workload = draw(settings)
    runs: list[Run] = []
    for name in names:
        layout = LAYOUTS[name](settings)
        life = live(workload, layout, settings)
        fits = fit(workload, LAYOUTS[name](settings))
        runs.append(Run(life=life, figures=figures(life, layout, fits, geometry)))
    comparison = compare(settings, workload, geometry)
    told = [run.figures for run in runs]
    if args.json:
        _print_json(settings, geometry, runs, comparison)
    else:
        tables = [*layouts_table(told), "", *comparison_tables(comparison, geometry)]
        print("\n".join([*heading(settings, geometry), "", *tables, ""]))
    if picture is not None:
        try:
            _draw(picture, settings, geometry, runs, comparison)
        except OSError as error:
            # Only a write to a file that is open names none.
            return _fail(f"{error.filename or picture}: {error.strerror}", 1)
        print(picture, file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(summary(settings, geometry, told, comparison))
    return 0


def _whole(parser: argparse._ActionsContainer, name: str, default: int, words: str) -> None:  # pyright: ignore[reportPrivateUsage]
    parser.add_argument(name, type=int, default=default, metavar="N", help=f"{words}; default: {default:,}")


def _share(parser: argparse.ArgumentParser, name: str, default: float, words: str) -> None:
    parser.add_argument(name, type=float, default=default, metavar="X", help=f"{words}; default: {default:g}")


def _geometry(args: argparse.Namespace) -> Geometry:
    model = model_named(args.model)
    given: dict[str, int] = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    for name, value in {**given, "element_bytes": args.element_bytes}.items():
        if not 1 <= value <= _MAX_SIZE:
            raise SettingsError(f"--{name.replace('_', '-')} is {value}; it must be from 1 to {_MAX_SIZE:,}")
    if given:
        model = replace(model, name=f"{model.name}, changed", **given)
    return Geometry(model=model, element_bytes=args.element_bytes)


def _settings(args: argparse.Namespace, geometry: Geometry) -> Settings:
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    if args.memory_gib is not None:
        most = MAX_MEMORY_TOKENS * geometry.token_bytes / 2**30
        if not 0 < args.memory_gib <= most:
            raise SettingsError(f"--memory-gib is {args.memory_gib:g}; it must be above 0 and at most {most:,.0f}")
        given["memory_tokens"] = int(args.memory_gib * 2**30) // geometry.token_bytes
    return Settings(**given)


def _print_json(settings: Settings, geometry: Geometry, runs: list[Run], comparison: Comparison) -> None:
    for run in runs:
        print(json.dumps(run.figures.told()))
    of = {"memory": "no cache", "settings": asdict(settings), "geometry": asdict(geometry)}
    print(json.dumps(of | asdict(comparison)))


def _cannot_draw(picture: Path) -> str | None:
    """Asked before the work, which may be long."""
    if not picture.parent.is_dir():
        return f"--png {picture}: there is no folder {picture.parent}"
    try:
        from scheduler_svc.kv_lab.charts import chart
    except ModuleNotFoundError as error:
        return f"{error.name} is missing: {_INSTALL}"
    del chart
    return None


def _draw(picture: Path, settings: Settings, geometry: Geometry, runs: list[Run], comparison: Comparison) -> None:
    from scheduler_svc.kv_lab.charts.chart import draw as draw_chart

    picture.write_bytes(draw_chart(settings, geometry, [(run.life, run.figures) for run in runs], comparison))


def _fail(words: str, code: int) -> int:
    print(f"error: {words}", file=sys.stderr)
    return code
