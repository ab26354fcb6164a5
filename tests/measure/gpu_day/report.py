"""The results of all parts as one JSON file and one page of Markdown, both written again after every change.

Owns the two files. Does not judge figures: only checks and outcomes decide whether a part passed.
"""

import json
from pathlib import Path
from typing import Any

from tests.measure.harness import words

RESULTS, SUMMARY = "results.json", "summary.md"
_PASSED = "passed"


class Report:
    """The results in a folder. Results of parts that an earlier command wrote there are kept."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self._folder, self._about = folder, about
        folder.mkdir(parents=True, exist_ok=True)
        before = folder / RESULTS
        self.parts: dict[str, dict[str, Any]] = json.loads(before.read_text())["parts"] if before.exists() else {}

    def update(self, part: str, outcome: str, seconds: float, content: dict[str, Any]) -> None:
        """Replaces a part's results. A check that is not ok makes the outcome of a part that ended `failed`."""
        failed = [check["name"] for check in content.get("checks", []) if not check["ok"]]
        if outcome == _PASSED and failed:
            outcome = f"failed: {failed[0]}"
        self.parts[part] = {"outcome": outcome, "seconds": round(seconds, 1), **content}
        _replace(self._folder / RESULTS, json.dumps({"about": self._about, "parts": self.parts}, indent=1))
        _replace(self._folder / SUMMARY, self.markdown())

    def all_passed(self, names: list[str]) -> bool:
        """Whether each of these parts ended and all of its checks are ok."""
        return all(self.parts.get(name, {}).get("outcome") == _PASSED for name in names)

    def markdown(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self._about.items())
        lines = ["# A day on a GPU", "", about, ""]
        if self._about.get("tiny"):
            lines += ["This was a tiny run, which shows that the parts work; its figures mean nothing.", ""]
        lines += ["| part | outcome | seconds |", "|---|---|---|"]
        lines += [f"| {name} | {part['outcome']} | {part['seconds']} |" for name, part in self.parts.items()]
        for name, part in self.parts.items():
            lines += ["", f"## {name}", *_section(part)]
        return "\n".join(lines) + "\n"


def _section(part: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for check in part.get("checks", []):
        detail = f": {check['detail']}" if check["detail"] else ""
        lines += ["", f"**{'ok' if check['ok'] else 'NOT OK'}** {check['name']}{detail}"]
    if part.get("figures"):
        lines += ["", "| figure | value | unit | what it is | spread | note |", "|---|---|---|---|---|---|"]
        lines += [_figure_line(figure) for figure in part["figures"]]
    for table in part.get("tables", []):
        lines += ["", f"{table['title']} ({table['kind']})", ""]
        lines += [_row(table["columns"]), _row(["---"] * len(table["columns"]))]
        lines += [_row([words(cell) for cell in row]) for row in table["rows"]]
    lines += [line for note in part.get("notes", []) for line in ("", note)]
    if part.get("phases"):
        lines += ["", "Seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in part["phases"])]
    return lines


def _figure_line(figure: dict[str, Any]) -> str:
    spread = ""
    if figure["low"] is not None:
        spread = f"{words(figure['low'])} to {words(figure['high'])} in {figure['repeats']} runs"
    return _row([figure["name"], words(figure["value"]), figure["unit"], figure["kind"], spread, figure["note"]])


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _replace(path: Path, text: str) -> None:
    """Writes a file at once, so that a killed command leaves a whole one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)
