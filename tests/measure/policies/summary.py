"""Medians over seeds, gains, verdicts and tables.

Owns the arithmetic of a verdict. Variants get the same requests seed by seed, so a gain is the median of the ratios of
pairs. A heuristic that gains less than 5 % everywhere is removed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scheduler_svc.simulator.report import duration
from tests.measure.policies.scenario import Experiment, Judged, Scenario
from tests.measure.policies.trial import Figures

LEAST_GAIN = 0.05
_SHOWN = (
    "tokens_per_second",
    "ttft_p50",
    "ttft_p99",
    "itl_p99",
    "preemptions",
    "recomputed",
    "hit_rate",
    "page_use",
)
_LABELS = {
    "tokens_per_second": "tokens/s",
    "requests_per_second": "requests/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p99": "ITL p99",
    "hit_rate": "hit rate",
    "page_use": "page use",
    "small_ttft_p50": "small p50",
    "small_ttft_p99": "small p99",
    "greedy_ttft_p99": "greedy p99",
    "total_mean": "total mean",
    "small_served": "small served",
    "jain": "Jain",
}
_SHARES = {"recomputed", "hit_rate", "page_use", "small_served"}
_WIDTH = 21

# By scenario and variant, the figures of each seed.
Runs = Mapping[tuple[str, str], Sequence[Figures]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of the first variant over `rival`, median and range over seeds. 0.05 is 5 % better."""

    judged: Judged
    rival: str
    middle: float
    least: float
    most: float


def gain(judged: Judged, ours: Sequence[Figures], rival: str, theirs: Sequence[Figures]) -> Gain:
    """Returns the share of the rival's cost that is saved, or the surplus over the rival's yield."""
    ratios = [
        (1 - _ratio(mine[judged.figure], other[judged.figure]))
        if judged.is_cost
        else (_ratio(mine[judged.figure], other[judged.figure]) - 1)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return Gain(judged=judged, rival=rival, middle=median(ratios), least=min(ratios), most=max(ratios))


def _ratio(mine: float, other: float) -> float:
    if other:
        return mine / other
    return 1.0 if not mine else float("inf")


def gains(experiment: Experiment, runs: Runs) -> list[Gain]:
    """Returns the gains of the first variant over each other one, for every judged figure."""
    first, *rivals = experiment.variants
    return [
        gain(judged, runs[judged.scenario, first.name], rival.name, runs[judged.scenario, rival.name])
        for rival in rivals
        for judged in experiment.judged
    ]


def verdict(experiment: Experiment, runs: Runs) -> str:
    """Returns one line per rival: the least and the largest gain in each figure, with their scenarios."""
    first, *rivals = experiment.variants
    lines: list[str] = []
    for rival in rivals:
        found = [each for each in gains(experiment, runs) if each.rival == rival.name]
        figures = dict.fromkeys(each.judged.figure for each in found)
        parts = "; ".join(_range([each for each in found if each.judged.figure == figure]) for figure in figures)
        lines.append(f"{first.name} against {rival.name} {_word(found)}: {parts}")
    return "\n".join(lines)


def _word(found: Sequence[Gain]) -> str:
    best, worst = max(each.middle for each in found), min(each.middle for each in found)
    if best >= LEAST_GAIN:
        return "gains" if worst > -LEAST_GAIN else "gains and loses"
    return "loses" if worst <= -LEAST_GAIN else "gains nothing"


def _range(found: Sequence[Gain]) -> str:
    label = _LABELS[found[0].judged.figure]
    if len(found) == 1:
        (one,) = found
        return f"{label} {one.middle:+.1%} (seeds {one.least:+.1%} to {one.most:+.1%})"
    least, most = min(found, key=lambda each: each.middle), max(found, key=lambda each: each.middle)
    return f"{label} {least.middle:+.1%} ({least.judged.scenario}) to {most.middle:+.1%} ({most.judged.scenario})"


def table(experiment: Experiment, scenario: Scenario, runs: Runs) -> str:
    """Returns a line per variant: the median and half the range over seeds."""
    shown = (*_SHOWN, *experiment.figures)
    if any(each.figure == "requests_per_second" for each in experiment.judged):
        shown = ("requests_per_second", *shown)
    width = max(len(variant.name) for variant in experiment.variants) + 2
    lines = [f"{scenario.name}: {scenario.words}"]
    lines.append(" " * width + "".join(f"{_LABELS.get(name, name):>{_WIDTH}}" for name in shown))
    for variant in experiment.variants:
        of_seeds = runs[scenario.name, variant.name]
        cells = "".join(f"{_cell(name, [each[name] for each in of_seeds]):>{_WIDTH}}" for name in shown)
        lines.append(f"{variant.name:{width}}{cells}")
    return "\n".join(lines)


def _cell(name: str, values: Sequence[float]) -> str:
    middle, spread = median(values), (max(values) - min(values)) / 2
    return _text(name, middle) + (f" ±{spread / middle:.0%}" if middle and len(values) > 1 else "")


def _text(name: str, value: float) -> str:
    if "ttft" in name or "itl" in name or "total" in name:
        return duration(value)
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:.3f}" if name == "jain" else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
