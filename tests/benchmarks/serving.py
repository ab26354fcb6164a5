"""Compares Tandem with Transformers: `python -m tests.benchmarks.serving [--json] [--quick] [--repeats N]`.

One run measures every engine on the same model, prompts, lengths and dtype: the engine on core 0 with one thread,
everything else on core 1, one engine after another in processes of its own. Owns the order, the comparison and the
report.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import machine, tandem_engine, workload
from tests.benchmarks.result import EngineResult, different_tokens
from tests.rigs.processes import Child

ENGINES = ("tandem", "static", "continuous")
BARS = {"static": 1.3, "continuous": 2.0}
BAR_MEMORY_MB = 300.0
_RUN_SECONDS = 3600.0


def run_peer(engine: str, model: Path, workload_file: Path) -> EngineResult:
    """Runs one peer in a process of its own."""
    arguments = ["tests.benchmarks.peers", engine, "--model", str(model), "--workload", str(workload_file)]
    child = Child(engine, arguments, environment={"OMP_NUM_THREADS": "1"})
    try:
        machine.pin(child.pid, machine.ENGINE_CORE)
        answer = json.loads(child.wait_line(r'^\{"engine".*\}$', _RUN_SECONDS).group())
        child.wait()
        return EngineResult(**answer)
    finally:
        child.kill()


def measure(engines: Sequence[str], repeats: int, load: workload.Workload) -> dict[str, list[EngineResult]]:
    """Interleaves the engines, so that a machine that slows down affects all of them."""
    machine.check_cores()
    machine.pin(os.getpid(), machine.REST_CORE)
    model = workload.model_folder()
    results: dict[str, list[EngineResult]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        load.save(file)
        for i in range(repeats):
            for engine in engines:
                print(f"run {i + 1} of {repeats}: {engine}", file=sys.stderr)
                run = tandem_engine.run(model, load, file) if engine == "tandem" else run_peer(engine, model, file)
                assert [len(tokens) for tokens in run.tokens] == load.output_lengths, f"{engine}: lengths differ"
                results[engine].append(run)
    return results


def summary(runs: list[EngineResult]) -> dict[str, Any]:
    """Returns the figures of the run with the median throughput, and the spread of the others."""
    by_speed = sorted(runs, key=lambda run: run.seconds)
    rates = [run.num_tokens / run.seconds for run in runs]
    figures = by_speed[len(runs) // 2].figures()
    return {**figures, "repeats": len(runs), "spread_tokens_per_second": [min(rates), max(rates)]}


def comparisons(results: dict[str, list[EngineResult]]) -> list[dict[str, Any]]:
    """Returns an entry for each bar, and one for the equality of tokens."""
    lines: list[dict[str, Any]] = []
    rates = {name: statistics.median(run.num_tokens / run.seconds for run in runs) for name, runs in results.items()}
    if "tandem" in results:
        for peer, bar in BARS.items():
            if peer in results:
                ratio = rates["tandem"] / rates[peer]
                lines.append({"bar": f"tandem / {peer} at least {bar}", "value": ratio, "met": ratio >= bar})
        peaks = [run.peak_mb["scheduler"] + run.peak_mb["front end"] for run in results["tandem"]]
        name = f"scheduler and front end together under {BAR_MEMORY_MB:.0f} MB"
        lines.append({"bar": name, "value": max(peaks), "met": max(peaks) < BAR_MEMORY_MB})
    every = [run for runs in results.values() for run in runs]
    differences = different_tokens(every)
    num_pairs = (len(every) - 1) * len(every[0].tokens)
    lines.append(
        {
            "bar": "identical tokens in all runs",
            "value": num_pairs - len(differences),
            "of": num_pairs,
            "met": not differences,
            "differences": differences[:8],
        }
    )
    return lines


def _spread(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in figures.items()) or "not measured"


def print_engine(figures: dict[str, Any]) -> None:
    """Prints one engine's figures."""
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
        print("  " + ", ".join(f"{name} {value:g}" for name, value in figures["details"].items()))


def main() -> int:
    """Returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.serving", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="run a smoke test: meaningless figures, no bars")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of tandem,static,continuous")
    args = parser.parse_args()
    engines = args.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engine: {', '.join(sorted(unknown))}")
    about = {
        "model": workload.MODEL_LINE,
        "machine": machine.description(),
        "versions": machine.versions(),
        "quick": args.quick,
    }
    results = measure(engines, args.repeats, workload.quick() if args.quick else workload.full())
    summaries = [summary(results[engine]) for engine in engines]
    bars = comparisons(results)
    if args.json:
        for line in (about, *summaries, *bars):
            print(json.dumps(line))
    else:
        print(f"{about['model']}\n{_words(about['machine'])}\n{_words(about['versions'])}")
        for figures in summaries:
            print_engine(figures)
        print()
        for line in bars:
            of = f" of {line['of']}" if "of" in line else ""
            print(f"{line['bar']}: {line['value']:.2f}{of}, {'met' if line['met'] else 'MISSED'}")
            for difference in line.get("differences", []):
                print(f"  {difference}")
    return 0 if args.quick or all(line["met"] for line in bars) else 1


def _words(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


if __name__ == "__main__":
    raise SystemExit(main())
