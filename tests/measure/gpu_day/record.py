"""What a part found out: phases, figures, checks, tables and notes, saved to a file after every entry.

Owns the record's format. A figure always says what it is (`Kind`), so that a page of results cannot present a limit, an
aim or another engine's published number as measured here.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.measure.harness import spread


class Kind(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    # Counted in this run, and the same on every machine: tokens, requests.
    COUNTED = "counted"
    # Computed from measured rates and the sizes of the model.
    MODEL = "model"
    AIM = "aim"
    # By another project, on another machine.
    PUBLISHED = "published"


@dataclass(kw_only=True)
class Record:
    """The results of one part. Each method adds an entry, prints it and saves the file.

    A figure has the spread of its repeats as low and high. A check is about correctness: one that is not ok fails the
    part, figures never do. A table's kind holds for all of its numbers.
    """

    part: str
    path: Path
    phases: list[tuple[str, float]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs within, and prints its name before it starts."""
        print(f"[{self.part}] {name} …", flush=True)
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self.phases.append((name, seconds))
        self._added(f"{name}: {seconds:.1f} s")

    def figure(self, name: str, value: float, unit: str, kind: Kind = Kind.MEASURED, *, note: str = "") -> None:
        self._figure(name, [value], unit, kind, note)
        self._added(f"{name}: {value:.6g} {unit} ({kind})")

    def repeated(self, name: str, values: Sequence[float], unit: str, *, note: str = "") -> None:
        """Adds the median of repeated measurements, with their spread."""
        middle, low, high = spread(values).values()
        self._figure(name, [middle, low, high], unit, Kind.MEASURED, note, repeats=len(values))
        self._added(f"{name}: {middle:.6g} {unit} ({low:.6g} to {high:.6g} in {len(values)} runs)")

    def _figure(self, name: str, values: list[float], unit: str, kind: Kind, note: str, repeats: int = 1) -> None:
        value, low, high = [*values, None, None][:3]
        figure = {"name": name, "value": value, "unit": unit, "kind": kind, "low": low, "high": high}
        self.figures.append({**figure, "repeats": repeats, "note": note})

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        self.checks.append({"name": name, "ok": ok, "detail": detail})
        self._added(f"{'ok' if ok else 'NOT OK'}: {name}{': ' if detail else ''}{detail}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], kind: Kind) -> None:
        """Adds a table; a table of the same title is replaced, so that a sweep can report as it goes."""
        self.tables = [table for table in self.tables if table["title"] != title]
        cells = [list(row) for row in rows]
        self.tables.append({"title": title, "kind": kind, "columns": list(columns), "rows": cells})
        self._save()

    def note(self, text: str) -> None:
        """Adds a sentence that a reader of the figures must know."""
        self.notes.append(text)
        self._added(text)

    def _added(self, line: str) -> None:
        print(f"[{self.part}] {line}", flush=True)
        self._save()

    def _save(self) -> None:
        content = {name: getattr(self, name) for name in ("phases", "figures", "checks", "tables", "notes")}
        # Another process reads the file at any time.
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(self.path)
