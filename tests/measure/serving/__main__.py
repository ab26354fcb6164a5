"""Compares Tandem with other engines: `python -m tests.measure.serving [--workload N] [--threads N] …`.

One run measures every engine on the same model, prompts, lengths and dtype. With `--threads 1` the engine has core 0
and one thread, and everything else core 1; with `--threads 2` the engine has two threads, and all share both cores.
Owns the command line and the exit code.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from tests.measure import machine, workload
from tests.measure.harness import Measurement
from tests.measure.result import EngineResult
from tests.measure.serving import bars, measure
from tests.measure.serving.tandem_engine import Options

# By workload; those without an interpreter are left out.
ENGINES = {
    1: ("tandem", "static", "continuous", "vllm"),
    2: ("tandem", "vllm", "llama"),
    3: ("tandem", "vllm", "llama"),
}


def parsed(measurement: Measurement) -> tuple[argparse.Namespace, dict[str, measure.Peer]]:
    """Returns the arguments, engines as a list, and the engines besides Tandem."""
    parser, flag = measurement.parser, measurement.flag
    flag("--workload", type=int, choices=list(workload.WORKLOADS), default=1)
    flag("--threads", type=int, choices=(1, 2), default=1, help="threads of the engine")
    flag("--repeats", type=int, default=3)
    flag("--requests", type=int, metavar="N", help="run the first N requests only")
    flag("--vllm", metavar="PYTHON", help="interpreter with vLLM's CPU build")
    flag("--llama", metavar="PYTHON", help="interpreter with llama-cpp-python and gguf")
    flag("--engines", help="some of tandem, static, continuous, vllm, llama, separated by commas")
    flag("--profile", action="store_true", help="print where the time of a worker's step goes")
    flag(
        "--busy", type=int, default=0, metavar="N", help="beside N busy loops: no worker may be given up; no other bars"
    )
    flag("--quick", action="store_true", help="run a smoke test: meaningless figures, no bars")
    args = measurement.begin()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    if args.busy and "tandem" not in (args.engines or "tandem").split(","):
        parser.error("--busy needs the engine tandem")
    most = len(workload.WORKLOADS[args.workload]().prompts)
    if args.requests is not None and not 1 <= args.requests <= most:
        parser.error(f"--requests is {args.requests}; workload {args.workload} has 1 to {most}")
    known = measure.peers(args.vllm, args.llama, args.threads)
    if args.engines is None:
        args.engines = [
            name for name in ENGINES[args.workload] if name == "tandem" or (name in known and not args.busy)
        ]
    else:
        args.engines = args.engines.split(",")
    for name in args.engines:
        if name != "tandem" and name not in known:
            hint = f"--{name} must name its interpreter" if name in ("vllm", "llama") else "there is no such engine"
            parser.error(f"--engines contains {name}: {hint}")
    return args, known


def main() -> int:
    measurement = Measurement("serving")
    args, known = parsed(measurement)
    load = workload.quick() if args.quick else workload.WORKLOADS[args.workload]()
    if args.requests is not None:
        load = load.first_requests(args.requests)
    model = workload.model_folder()
    options = Options(threads=args.threads, profiled=args.profile, busy=args.busy)
    measured = measure.measure(args.engines, known, args.repeats, load, model, options)
    results = measured.results
    measurement.line(
        {
            "workload": f"workload {args.workload}: {load.description()}; {args.threads} threads",
            "model": workload.MODEL_LINE,
            "versions": machine.versions(),
            "quick": args.quick,
        }
    )
    for engine in args.engines:
        measurement.line(summary(results[engine]))
    for roofline in measured.rooflines:
        measurement.line({"roofline": roofline})
    if args.profile:
        measurement.line({"profile": measured.profile})
    if args.busy:
        measurement.bar(bars.healthy_workers(results["tandem"], args.busy))
        return measurement.exit_code
    found = bars.differences(load, results)
    for line in (
        *bars.equal_tokens(results, found),
        *bars.aims(args.workload, args.threads, results, measured.rooflines),
    ):
        measurement.line(line)
    measurement.bar(*bars.comparisons(args.workload, args.threads, results))
    measurement.bar(bars.near_ties(measure.near_ties(model, bars.cases(found))))
    return 0 if args.quick else measurement.exit_code


def summary(runs: Sequence[EngineResult]) -> dict[str, Any]:
    """Returns the figures of the run with the median throughput, and the spread of the others."""
    by_speed = sorted(runs, key=lambda run: run.seconds)
    rates = [run.num_tokens / run.seconds for run in runs]
    figures = by_speed[len(runs) // 2].figures()
    return {**figures, "repeats": len(runs), "spread_tokens_per_second": [min(rates), max(rates)]}


if __name__ == "__main__":
    raise SystemExit(main())
