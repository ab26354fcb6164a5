"""The limits of each workload and number of threads, and the comparison of tokens.

Owns the bars, which decide the exit code, and the aims, which do not. Knows nothing of how engines run.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.measure.harness import Bar
from tests.measure.result import EngineResult
from tests.measure.workload import Workload

Results = dict[str, list[EngineResult]]

BAR_MEMORY_MB = 300.0
# Share of the speed of the worker alone, by threads of the worker.
BAR_SERVICE = {1: 0.95, 2: 0.88}
AIM_ROOFLINE = 0.7
# Logits of this model are some 10; its float32 errors are 1e-5.
NEAR_TIE = 1e-3
_MOST_CASES = 16


# How many times as fast as a peer Tandem must be, by workload and threads.
_SPEED: dict[tuple[int, int], dict[str, float]] = {
    (1, 1): {"vllm": 1.0, "static": 3.2, "continuous": 2.0},
    (1, 2): {"vllm": 1.0},
}
_AHEAD = {"vllm": 1.0, "llama": 1.0}
# In these workloads the median time to the first token must not be longer than a peer's, either.
_SOONER = (2,)
# How many times as fast it should be.
AIMS = {(1, 1, "vllm"): 1.2, (1, 1, "static"): 4.0}


def _median(runs: Sequence[EngineResult], figure: Callable[[EngineResult], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def _rate(run: EngineResult) -> float:
    return run.num_tokens / run.seconds


def _ttft_ms(run: EngineResult) -> float:
    return run.figures()["ttft_ms"]["p50"]


def healthy_workers(runs: Sequence[EngineResult], busy: int) -> Bar:
    """Returns the bar for Tandem's runs beside `busy` busy loops: no worker was given up, so none was reset."""
    count = sum(run.details["workers_given_up"] for run in runs)
    return Bar(name=f"workers given up beside {busy} busy loops", value=count, limit=0)


def comparisons(number: int, threads: int, results: Results) -> Iterator[Bar]:
    """Yields each bar of workload `number` that the runs allow to judge."""
    if not (runs := results.get("tandem")):
        return
    limits = _SPEED.get((number, threads), _AHEAD)
    peers = {peer: results[peer] for peer in limits if results.get(peer)}
    for peer, theirs in peers.items():
        value, name = _median(runs, _rate) / _median(theirs, _rate), f"output tokens/s, tandem / {peer}"
        yield Bar(name=name, value=value, limit=limits[peer], is_floor=True)
    for peer, theirs in peers.items() if number in _SOONER else ():
        value = _median(theirs, _ttft_ms) / _median(runs, _ttft_ms)
        yield Bar(name=f"median time to first token, {peer} / tandem", value=value, limit=1.0, is_floor=True)
    if all("service_per_worker_alone" in run.details for run in runs):
        value = _median(runs, lambda run: run.details["service_per_worker_alone"])
        name = "speed of the service / of its worker alone"
        yield Bar(name=name, value=value, limit=BAR_SERVICE[threads], is_floor=True)
    peak = max(run.peak_mb["scheduler"] + run.peak_mb["front end"] for run in runs)
    yield Bar(name="scheduler and front end together, MB", value=peak, limit=BAR_MEMORY_MB)


def aims(
    number: int, threads: int, results: Results, rooflines: Sequence[dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """Yields a line for each aim, and whether it is reached. It does not decide the exit code."""
    if not (runs := results.get("tandem")):
        return
    found = {
        f"output tokens/s, tandem / {peer}": (_median(runs, _rate) / _median(results[peer], _rate), aim)
        for (*of, peer), aim in AIMS.items()
        if of == [number, threads] and results.get(peer)
    }
    if rooflines:
        limit = max(roofline["tokens_per_second"] for roofline in rooflines)
        found["share of the roofline"] = _median(runs, _rate) / limit, AIM_ROOFLINE
    for name, (value, aim) in found.items():
        yield {"aim": f"{name}: {aim:g}", "value": value, "reached": value >= aim}


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


def equal_tokens(results: Results, found: Sequence[Difference]) -> Iterator[dict[str, Any]]:
    """Yields a line for each engine with its equal requests."""
    first = next(iter(results.values()))[0]
    for engine, runs in results.items():
        if num_runs := len(runs) - (engine == first.engine):
            total = num_runs * len(first.tokens)
            different = [one for one in found if one.engines[1] == engine]
            name = f"requests with {first.engine}'s tokens, {engine}"
            examples = [str(one) for one in different[:4]]
            yield {"tokens": name, "equal": total - len(different), "of": total, "differences": examples}


def near_ties(margins: Sequence[dict[str, float]]) -> Bar:
    largest = max((max(one.values()) for one in margins), default=0.0)
    return Bar(name=f"largest margin of {len(margins)} differences in float64", value=largest, limit=NEAR_TIE)
