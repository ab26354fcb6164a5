"""Text and JSON of a comparison. Owns the wording; computes nothing but medians over runs."""

import json
from collections.abc import Sequence
from typing import Any

from tests.measure.result import EngineResult


def summary(runs: Sequence[EngineResult]) -> dict[str, Any]:
    """Returns the figures of the run with the median throughput, and the spread of the others."""
    by_speed = sorted(runs, key=lambda run: run.seconds)
    rates = [run.num_tokens / run.seconds for run in runs]
    figures = by_speed[len(runs) // 2].figures()
    return {**figures, "repeats": len(runs), "spread_tokens_per_second": [min(rates), max(rates)]}


def print_json(lines: Sequence[dict[str, Any]]) -> None:
    """Prints one object per line."""
    for line in lines:
        print(json.dumps(line))


def print_text(
    about: dict[str, Any],
    summaries: Sequence[dict[str, Any]],
    rooflines: Sequence[dict[str, float]],
    bars: Sequence[dict[str, Any]],
) -> None:
    """Prints the whole report but the profile."""
    print(f"{about['workload']}\n{about['model']}\n{_words(about['machine'])}\n{_words(about['versions'])}")
    for figures in summaries:
        _print_engine(figures)
    for roofline in rooflines:
        _print_roofline(roofline)
    print()
    for line in bars:
        _print_bar(line)


def _print_engine(figures: dict[str, Any]) -> None:
    low, high = figures["spread_tokens_per_second"]
    spread = f" ({low:.0f} to {high:.0f} in {figures['repeats']} runs)" if figures["repeats"] > 1 else ""
    print(f"\n{figures['engine']}: {figures['tokens_per_second']:.1f} output tokens/s{spread}")
    print(f"  {figures['note']}")
    rate = figures["tokens_per_engine_cpu_second"]
    print(f"  {figures['output_tokens']} tokens in {figures['seconds']:.2f} s")
    print(f"  per second of its own CPU: {rate:.1f} output tokens")
    print(f"  time to first token, ms:   {_spread(figures['ttft_ms'])}")
    print(f"  between tokens, ms:        {_spread(figures['itl_ms'])}")
    if outside := figures["outside_cpu_us_per_token"]:
        print(f"  CPU outside the worker:    {sum(outside.values()):.0f} us per token ({_spread(outside)})")
    print(f"  peak memory, MB:           {_spread(figures['peak_mb'])}")
    if figures["details"]:
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in figures["details"].items()))


def _print_roofline(line: dict[str, float]) -> None:
    print(
        f"\nroofline: {line['tokens_per_second']:.0f} output tokens/s: {line['prefill_seconds']:.2f} s of prompts and "
        f"{line['decode_seconds']:.2f} s of decode steps\n  reads {line['bandwidth'] / 1e9:.1f} GB/s, multiplies "
        f"{line['prefill'] / 1e9:.0f} GFLOP/s with the rows of a prompt's step and {line['decode'] / 1e9:.0f} with "
        "those of a decode step"
    )


def _print_bar(line: dict[str, Any]) -> None:
    of = f" of {line['of']}" if "of" in line else ""
    number = f"{line['value']:.3g}" if line["value"] < 10 else f"{line['value']:.0f}"
    words = [f"{line['bar']}: {number}{of}"]
    if "met" in line:
        bar = f"bar {line['at_least']:g} " if "at_least" in line else ""
        words.append(f"{bar}{'met' if line['met'] else 'MISSED'}")
    if "aim" in line:
        words.append(f"aim {line['aim']:g} {'reached' if line['aim_met'] else 'not reached'}")
    print(", ".join(words))
    for difference in line.get("differences", []):
        print(f"  {difference}")


def print_profile(profile: dict[str, Any]) -> None:
    """Prints where a step's time goes, for each kind of step."""
    for kind, found in profile.items():
        print(f"\n{kind}: {found['steps']} steps, {found['step_ms']:.2f} ms each, {found['tokens']:.0f} tokens")
        for name, share in sorted(found["shares"].items(), key=lambda item: -item[1]):
            print(f"  {name:<20}{share:7.1%}{share * found['step_ms']:9.2f} ms")
        for name, share in found["largest"]:
            print(f"    {share:6.1%}  {name}")


def _spread(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in figures.items()) or "not measured"


def _words(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
