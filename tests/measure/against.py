"""Compares a measurement of two checkouts: `python -m tests.measure.against DIR [--rounds N] NAME [FLAG …]`.

Runs the measurement NAME with `--json` in the checkout DIR, in this one, and in DIR once more, in turns, each with its
own code. The second run of DIR is the control: what differs between two runs of the same code is noise. Prints for each
figure the median of both checkouts, the ratio of this one's to DIR's, and the control's ratio; a ratio is the median
over the rounds, with its range. A figure stands out if its range is outside the control's.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.measure.harness import Measurement, in_turns, spread

ROOT = Path(__file__).resolve().parents[2]
# Measurements stood in tests/benchmarks before they had a harness.
_PACKAGES = ("measure", "benchmarks")

Run = dict[str, float]
# Numbers that say what was measured, not what came out.
_SIZES = ("rows", "lanes")


def figures(printed: str) -> Run:
    """Returns every number of the lines of JSON by its path; a path begins with the texts and sizes of its line."""
    found: Run = {}
    for text in printed.splitlines():
        if text.startswith("{"):
            line: dict[str, Any] = json.loads(text)
            sizes = [f"{line.pop(size)} {size}" for size in _SIZES if size in line]
            title = ", ".join([*(each for each in line.values() if isinstance(each, str)), *sizes])
            for path, value in _numbers(line):
                # A spread is named by its median.
                path = path.removesuffix(".median")
                name = f"{title}: {path}" if title else path
                while name in found:
                    name += "'"
                found[name] = value
    return found


def _numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in ("machine", "versions", "rounds", "about"):
                yield from _numbers(each, f"{path}.{name}" if path else name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def run(checkout: Path, name: str, flags: list[str]) -> Run:
    """Runs a measurement of a checkout. Raises CalledProcessError for an error; a missed bar is not one."""
    package = next(each for each in _PACKAGES if (checkout / "tests" / each / "machine.py").exists())
    if not (checkout / ".stubs").exists():
        # Names of fields change from commit to commit, so this checkout's stubs serve no other.
        subprocess.run([sys.executable, "protos/build_hook.py"], cwd=checkout, check=True)
    paths = [checkout, checkout / "client", checkout / "protos", checkout / ".stubs"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", f"tests.{package}.{name}", "--json", *flags]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    found = figures(done.stdout)
    if done.returncode not in (0, 1) or not found:
        raise subprocess.CalledProcessError(done.returncode, command)
    return found


def compared(before: list[Run], after: list[Run], control: list[Run]) -> Iterator[dict[str, Any]]:
    """Yields a line for every figure that all runs have and that is never 0."""
    for name in before[0]:
        sides = [[each.get(name, 0.0) for each in runs] for runs in (before, after, control)]
        if all(map(all, sides)):
            of_control = spread([third / first for first, third in zip(sides[0], sides[2], strict=True)])
            ratio = spread([second / first for first, second in zip(sides[0], sides[1], strict=True)])
            stands_out = ratio["least"] > of_control["most"] or ratio["most"] < of_control["least"]
            yield {"figure": name, "before": median(sides[0]), "after": median(sides[1]), "ratio": ratio,
                   "control": of_control, "stands_out": stands_out}  # fmt: skip


def _text(line: dict[str, Any]) -> str:
    ratio, control = ("{median:.3f} ({least:.3f} to {most:.3f})".format(**line[name]) for name in ("ratio", "control"))
    mark = " *" if line["stands_out"] else ""
    return f"{line['figure'][-70:]:<71}{line['before']:>12,.4g}{line['after']:>12,.4g}  {ratio}  {control}{mark}"


def main() -> int:
    measurement = Measurement("against")
    measurement.flag("checkout", type=Path, metavar="DIR", help="the checkout to compare with")
    measurement.flag("--rounds", type=int, default=3)
    measurement.flag("name", metavar="NAME", help="the measurement, such as core")
    measurement.flag("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="its flags")
    args = measurement.begin()
    before = args.checkout.resolve()
    sides = {"before": before, "after": ROOT, "control": before}
    runs = in_turns(args.rounds, {side: lambda at=at: run(at, args.name, args.flags) for side, at in sides.items()})
    measurement.note(
        f"{'figure':<71}{'before':>12}{'after':>12}  ratio, and the control's; *: outside the control's range"
    )
    for line in compared(runs["before"], runs["after"], runs["control"]):
        measurement.line(line, text=_text(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
