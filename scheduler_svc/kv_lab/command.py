"""`tandem simulate --memory …`: the lab's options and what it prints. Computes no figure."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

from pydantic import BaseModel, Field

from scheduler_svc.kv_lab.charts.figures import Result, figures
from scheduler_svc.kv_lab.charts.tables import comparison_tables, heading, layouts_table, summary
from scheduler_svc.kv_lab.comparison import Comparison, compare
from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.layouts.registry import LAYOUTS
from scheduler_svc.kv_lab.run import count_that_fit, run_workload
from scheduler_svc.kv_lab.settings import MAX_MEMORY_TOKENS, Settings
from scheduler_svc.kv_lab.workload import draw
from scheduler_svc.simulator.cost.hardware import MODELS
from tandem_contract.settings import Program, SettingError, checked, file, number, one_of

_DESCRIPTION = """\
The KV cache lab: runs the same sequences through four layouts of the same memory, and compares generation with and
without a cache in exact arithmetic. --png draws the memory of each layout over time."""
_MAX_SIZE = 1_048_576
# This program is part of a checkout, never of the wheel.
_INSTALL = "make install"
_SIZES = {"layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size"}
_Size = Annotated[int | None, Field(ge=1, le=_MAX_SIZE, title="N", description="size in place of the model's own")]


class ModelOptions(BaseModel):
    """The model and the size of its K/V."""

    memory_gib: float | None = Field(
        None, gt=0, le=1 << 20, title="GIB", description="memory in GiB, in place of --memory-tokens"
    )
    model: Annotated[str, one_of(MODELS)] = Field("llama-3.1-8b", title="NAME", description=", ".join(MODELS))
    layers: _Size = None
    hidden: _Size = None
    heads: _Size = None
    kv_heads: _Size = None
    head_dim: _Size = None
    intermediate: _Size = None
    vocab_size: _Size = None
    element_bytes: int = number(2, 1, _MAX_SIZE, "N", "bytes per number, in K/V and weights")

    def geometry(self) -> Geometry:
        """Returns the named model with the sizes that the options replace."""
        sizes = self.model_dump(include=_SIZES, exclude_none=True)
        model = MODELS[self.model]
        if sizes:
            model = replace(model, name=f"{model.name}, changed", **sizes)
        return Geometry(model=model, element_bytes=self.element_bytes)


class OutputOptions(BaseModel):
    """What is printed and drawn."""

    memory: Annotated[str, one_of([*LAYOUTS, "all"])] = Field(
        "all", title="LAYOUT", description=f"memory layout: {', '.join(LAYOUTS)} or all"
    )
    png: Path | None = file("draw the memory of each layout over time")
    all_panels: bool = Field(False, description="with --png: draw all other figures too")
    as_json: bool = Field(False, alias="json", description="print one JSON object per layout and one of the comparison")


class Options(OutputOptions, ModelOptions, Settings):
    """Every option of the lab."""

    def settings(self, geometry: Geometry) -> Settings:
        """Returns the settings of the run, with the memory in tokens. Raises SettingError."""
        settings = self.model_dump(include=set(Settings.model_fields))
        if self.memory_gib is not None:
            if "memory_tokens" in self.model_fields_set:
                raise SettingError("--memory-tokens cannot be combined with --memory-gib")
            limit = MAX_MEMORY_TOKENS * geometry.token_bytes / 2**30
            if self.memory_gib > limit:
                raise SettingError(f"--memory-gib is {self.memory_gib:g}; it must be at most {limit:,.0f}")
            settings["memory_tokens"] = int(self.memory_gib * 2**30) // geometry.token_bytes
        return checked(Settings, settings)


def run(program: str, arguments: Sequence[str]) -> int:
    """Returns the exit code, 1 if the picture cannot be drawn or written. Raises SettingError and ValueError."""
    groups = {
        "output": [field.alias or name for name, field in OutputOptions.model_fields.items()],
        "sequences and layouts": Settings.model_fields,
        "model": ModelOptions.model_fields,
    }
    reader = Program(command=program, model=Options, description=_DESCRIPTION, groups=groups)
    options = reader.read(arguments, {})
    geometry = options.geometry()
    settings = options.settings(geometry)
    chart: ModuleType | None = None
    if options.png is not None:
        # Checked before the run, which may be long.
        if not options.png.parent.is_dir():
            return _fail(f"--png {options.png}: there is no folder {options.png.parent}")
        try:
            from scheduler_svc.kv_lab.charts import chart
        except ModuleNotFoundError as error:
            return _fail(f"{error.name} is missing: {_INSTALL}")
    results, comparison = _results(options, settings, geometry)
    table_figures = [result.figures for result in results]
    if options.as_json:
        _print_json(settings, geometry, results, comparison)
    else:
        tables = [*layouts_table(table_figures), "", *comparison_tables(comparison, geometry)]
        print("\n".join([*heading(settings, geometry), "", *tables, ""]))
    if chart is not None and options.png is not None:
        try:
            picture = chart.figure_of(settings, geometry, results, comparison, all_panels=options.all_panels)
            picture.savefig(options.png, format="png")  # pyright: ignore[reportUnknownMemberType]
        except OSError as error:
            # An error of write() carries no file name.
            return _fail(f"{error.filename or options.png}: {error.strerror}")
        print(options.png, file=sys.stderr if options.as_json else sys.stdout)
    if not options.as_json:
        if options.png is None:
            print("--png FILE draws the memory of each layout over time, --all-panels the other figures too")
        print(summary(settings, geometry, table_figures, comparison))
    return 0


def _results(options: Options, settings: Settings, geometry: Geometry) -> tuple[list[Result], Comparison]:
    workload = draw(settings)
    results: list[Result] = []
    for name in LAYOUTS if options.memory == "all" else [options.memory]:
        layout = LAYOUTS[name](settings)
        record = run_workload(workload, layout, settings)
        fits = count_that_fit(workload, LAYOUTS[name](settings))
        results.append(Result(record=record, figures=figures(record, layout, fits, geometry)))
    return results, compare(settings, workload, geometry)


def _print_json(settings: Settings, geometry: Geometry, results: Sequence[Result], comparison: Comparison) -> None:
    for result in results:
        print(json.dumps(result.figures.as_json()))
    of = {"memory": "no cache", "settings": settings.model_dump(), "geometry": asdict(geometry)}
    print(json.dumps(of | asdict(comparison)))


def _fail(words: str) -> int:
    print(f"error: {words}", file=sys.stderr)
    return 1
