"""Compares Tandem with other engines: `python -m tests.measure.serving [--workload N] [--threads N] …`.

One run measures every engine on the same model, prompts, lengths and dtype. With `--threads 1` the engine has core 0
and one thread, and everything else core 1; with `--threads 2` the engine has two threads, and all share both cores.
Owns the command line and the exit code.
"""

import argparse

from tests.measure import machine, workload
from tests.measure.serving import bars, measure, report
from tests.measure.serving.tandem_engine import Options

# By workload; those without an interpreter are left out.
ENGINES = {
    1: ("tandem", "static", "continuous", "vllm"),
    2: ("tandem", "vllm", "llama"),
    3: ("tandem", "vllm", "llama"),
}


def parsed() -> tuple[argparse.Namespace, dict[str, measure.Peer]]:
    """Returns the arguments, engines as a list, and the engines besides Tandem."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.serving", allow_abbrev=False)
    parser.add_argument("--workload", type=int, choices=list(workload.WORKLOADS), default=1)
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1, help="threads of the engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, metavar="N", help="run the first N requests only")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM's CPU build")
    parser.add_argument("--llama", metavar="PYTHON", help="interpreter with llama-cpp-python and gguf")
    parser.add_argument("--engines", help="some of tandem, static, continuous, vllm, llama, separated by commas")
    parser.add_argument("--replays", type=int, default=1, help="replays of each run by its worker alone")
    parser.add_argument("--profile", action="store_true", help="print where the time of a worker's step goes")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="beside N busy loops: no worker may be given up; no other bars"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="run a smoke test: meaningless figures, no bars")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    if args.busy and "tandem" not in (args.engines or "tandem").split(","):
        parser.error("--busy needs the engine tandem")
    if args.replays < args.profile:
        parser.error(f"--replays is {args.replays}; --profile needs one")
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
    """Returns 1 if a bar is missed."""
    args, known = parsed()
    load = workload.quick() if args.quick else workload.WORKLOADS[args.workload]()
    if args.requests is not None:
        load = load.first_requests(args.requests)
    model = workload.model_folder()
    options = Options(threads=args.threads, replays=args.replays, profiled=args.profile, busy=args.busy)
    measured = measure.measure(args.engines, known, args.repeats, load, model, options)
    results = measured.results
    if args.busy:
        lines = bars.healthy_workers(results["tandem"], args.busy)
    else:
        found = bars.differences(load, results)
        lines = bars.comparisons(args.workload, args.threads, results, measured.rooflines)
        lines += bars.token_lines(results, found, measure.near_ties(model, bars.cases(found)))
    about = {
        "workload": f"workload {args.workload}: {load.description()}; {args.threads} threads",
        "model": workload.MODEL_LINE,
        "machine": machine.description(),
        "versions": machine.versions(),
        "quick": args.quick,
    }
    summaries = [report.summary(results[engine]) for engine in args.engines]
    if args.json:
        rooflines = [{"roofline": roofline} for roofline in measured.rooflines]
        report.print_json([about, *summaries, *rooflines, *lines, {"profile": measured.profile}])
    else:
        report.print_text(about, summaries, measured.rooflines, lines)
        report.print_profile(measured.profile)
    return 0 if (args.quick and not args.busy) or all(line.get("met", True) for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
