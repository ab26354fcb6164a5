"""Text of a comparison. Owns the wording; computes nothing but medians over runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.measure.result import EngineResult


def summary(runs: Sequence[EngineResult]) -> dict[str, Any]:
    """Returns the figures of the run with the median throughput, and the spread of the others."""
    by_speed = sorted(runs, key=lambda run: run.seconds)
    rates = [run.num_tokens / run.seconds for run in runs]
    figures = by_speed[len(runs) // 2].figures()
    return {**figures, "repeats": len(runs), "spread_tokens_per_second": [min(rates), max(rates)]}


def engine(figures: dict[str, Any]) -> Iterator[str]:
    """Yields the figures of an engine."""
    low, high = figures["spread_tokens_per_second"]
    spread = f" ({low:.0f} to {high:.0f} in {figures['repeats']} runs)" if figures["repeats"] > 1 else ""
    yield f"\n{figures['engine']}: {figures['tokens_per_second']:.1f} output tokens/s{spread}"
    yield f"  {figures['note']}"
    rate = figures["tokens_per_engine_cpu_second"]
    yield f"  {figures['output_tokens']} tokens in {figures['seconds']:.2f} s"
    yield f"  per second of its own CPU: {rate:.1f} output tokens"
    yield f"  time to first token, ms:   {_spread(figures['ttft_ms'])}"
    yield f"  between tokens, ms:        {_spread(figures['itl_ms'])}"
    if outside := figures["outside_cpu_us_per_token"]:
        yield f"  CPU outside the worker:    {sum(outside.values()):.0f} us per token ({_spread(outside)})"
    yield f"  peak memory, MB:           {_spread(figures['peak_mb'])}"
    if figures["details"]:
        yield "  " + ", ".join(f"{name} {value:.4g}" for name, value in figures["details"].items())


def roofline(line: dict[str, float]) -> str:
    """Returns the limit of the machine."""
    return (
        f"\nroofline: {line['tokens_per_second']:.0f} output tokens/s: {line['prefill_seconds']:.2f} s of prompts and "
        f"{line['decode_seconds']:.2f} s of decode steps\n  reads {line['bandwidth'] / 1e9:.1f} GB/s, multiplies "
        f"{line['prefill'] / 1e9:.0f} GFLOP/s with the rows of a prompt's step and {line['decode'] / 1e9:.0f} with "
        "those of a decode step"
    )


def bar(line: dict[str, Any]) -> Iterator[str]:
    """Yields a bar, an aim, or a comparison of tokens."""
    of = f" of {line['of']}" if "of" in line else ""
    number = f"{line['value']:.3g}" if line["value"] < 10 else f"{line['value']:.0f}"
    words = [f"{line['bar']}: {number}{of}"]
    if "met" in line:
        limit = f"bar {line['at_least']:g} " if "at_least" in line else ""
        words.append(f"{limit}{'met' if line['met'] else 'MISSED'}")
    if "aim" in line:
        words.append(f"aim {line['aim']:g} {'reached' if line['aim_met'] else 'not reached'}")
    yield ", ".join(words)
    for difference in line.get("differences", []):
        yield f"  {difference}"


def profile(found: dict[str, Any]) -> Iterator[str]:
    """Yields where a step's time goes, for each kind of step."""
    for kind, of in found.items():
        yield f"\n{kind}: {of['steps']} steps, {of['step_ms']:.2f} ms each, {of['tokens']:.0f} tokens"
        for name, share in sorted(of["shares"].items(), key=lambda item: -item[1]):
            yield f"  {name:<20}{share:7.1%}{share * of['step_ms']:9.2f} ms"
        for name, share in of["largest"]:
            yield f"    {share:6.1%}  {name}"


def _spread(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in figures.items()) or "not measured"
