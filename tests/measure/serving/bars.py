"""The limits of each workload and number of threads, and the comparison of tokens.

Owns the bars, which decide the exit code, and the aims, which do not. Knows nothing of how engines run.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.measure.result import EngineResult
from tests.measure.workload import Workload

Results = dict[str, list[EngineResult]]
Line = dict[str, Any]

BAR_MEMORY_MB = 300.0
# Share of the speed of the worker alone, by threads of the worker.
BAR_SERVICE = {1: 0.95, 2: 0.88}
AIM_ROOFLINE = 0.7
# Logits of this model are some 10; its float32 errors are 1e-5.
NEAR_TIE = 1e-3
_MOST_CASES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How many times as fast as a peer Tandem must be, and should be. `figure`: rate or ttft."""

    peer: str
    at_least: float
    aim: float | None = None
    figure: str = "rate"


_AHEAD = [Bar(peer=peer, at_least=1.0) for peer in ("vllm", "llama")]
_SOONER = [Bar(peer=peer, at_least=1.0, figure="ttft") for peer in ("vllm", "llama")]
BARS: dict[tuple[int, int], list[Bar]] = {
    (1, 1): [
        Bar(peer="vllm", at_least=1.0, aim=1.2),
        Bar(peer="static", at_least=3.2, aim=4.0),
        Bar(peer="continuous", at_least=2.0),
    ],
    (1, 2): [Bar(peer="vllm", at_least=1.0)],
    (2, 1): [*_AHEAD, *_SOONER],
    (2, 2): [*_AHEAD, *_SOONER],
    (3, 1): _AHEAD,
    (3, 2): _AHEAD,
}


def _line(name: str, value: float, at_least: float | None, aim: float | None = None) -> Line:
    line: Line = {"bar": name, "value": value}
    if at_least is not None:
        line |= {"at_least": at_least, "met": value >= at_least}
    if aim is not None:
        line |= {"aim": aim, "aim_met": value >= aim}
    return line


def _median(runs: Sequence[EngineResult], figure: Callable[[EngineResult], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def _rate(run: EngineResult) -> float:
    return run.num_tokens / run.seconds


def _ttft_ms(run: EngineResult) -> float:
    return run.figures()["ttft_ms"]["p50"]


def healthy_workers(runs: Sequence[EngineResult], busy: int) -> list[Line]:
    """Returns the line for Tandem's runs beside `busy` busy loops: no worker was given up, so none was reset."""
    count = sum(run.details["workers_given_up"] for run in runs)
    return [{"bar": f"workers given up beside {busy} busy loops", "value": count, "met": not count}]


def comparisons(number: int, threads: int, results: Results, rooflines: Sequence[dict[str, float]]) -> list[Line]:
    """Returns a line for each bar and aim of workload `number` that the runs allow to judge."""
    runs = results.get("tandem")
    if not runs:
        return []
    lines: list[Line] = []
    for bar in BARS[number, threads]:
        if not (theirs := results.get(bar.peer)):
            continue
        if bar.figure == "rate":
            value = _median(runs, _rate) / _median(theirs, _rate)
            lines.append(_line(f"output tokens/s, tandem / {bar.peer}", value, bar.at_least, bar.aim))
        else:
            value = _median(theirs, _ttft_ms) / _median(runs, _ttft_ms)
            lines.append(_line(f"median time to first token, {bar.peer} / tandem", value, bar.at_least, bar.aim))
    if all("service_per_worker_alone" in run.details for run in runs):
        value = _median(runs, lambda run: run.details["service_per_worker_alone"])
        lines.append(_line("speed of the service / of its worker alone", value, BAR_SERVICE[threads]))
    if rooflines:
        limit = max(roofline["tokens_per_second"] for roofline in rooflines)
        lines.append(_line("share of the roofline", _median(runs, _rate) / limit, None, AIM_ROOFLINE))
    peak = max(run.peak_mb["scheduler"] + run.peak_mb["front end"] for run in runs)
    name = f"scheduler and front end together, MB, under {BAR_MEMORY_MB:.0f}"
    lines.append({"bar": name, "value": peak, "met": peak < BAR_MEMORY_MB})
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token of a request that differs between two engines."""

    request: int
    position: int
    length: int
    engines: tuple[str, str]
    tokens: tuple[int, int]
    # The prompt and the output that both engines agree on.
    text: tuple[int, ...]

    def __str__(self) -> str:
        one, other = self.engines
        return f"request {self.request}: {one} and {other} differ from token {self.position} of {self.length}"


def differences(workload: Workload, results: Results) -> list[Difference]:
    """Compares every run with the first run of the first engine."""
    every = [run for runs in results.values() for run in runs]
    found: list[Difference] = []
    for run in every[1:]:
        pairs = zip(workload.prompts, every[0].tokens, run.tokens, strict=True)
        for request, (prompt, ours, theirs) in enumerate(pairs):
            at = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if at is not None:
                found.append(
                    Difference(
                        request=request,
                        position=at,
                        length=len(ours),
                        engines=(every[0].engine, run.engine),
                        tokens=(ours[at], theirs[at]),
                        text=(*prompt, *ours[:at]),
                    )
                )
    return found


def cases(found: Sequence[Difference]) -> list[tuple[list[int], int, int]]:
    """Returns the text and the two tokens of different differences, a limited number of them."""
    unique = {(one.text, one.tokens): one for one in found}
    return [(list(one.text), *one.tokens) for one in unique.values()][:_MOST_CASES]


def token_lines(results: Results, found: Sequence[Difference], margins: Sequence[dict[str, float]]) -> list[Line]:
    """Returns a line for each engine with its equal requests, and one for the differences' margins."""
    lines: list[Line] = []
    first = next(iter(results.values()))[0]
    for engine, runs in results.items():
        num_runs = len(runs) - (engine == first.engine)
        if num_runs:
            total = num_runs * len(first.tokens)
            different = [one for one in found if one.engines[1] == engine]
            name = f"requests with {first.engine}'s tokens, {engine}"
            lines.append(
                {
                    "bar": name,
                    "value": total - len(different),
                    "of": total,
                    "differences": [str(one) for one in different[:4]],
                }
            )
    largest = max((max(one.values()) for one in margins), default=0.0)
    name = f"differences are near ties: largest margin of {len(margins)} in float64, under {NEAR_TIE:g}"
    lines.append({"bar": name, "value": largest, "met": largest < NEAR_TIE})
    return lines
