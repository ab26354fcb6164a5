"""The flags of `tandem simulate`, their bounds and defaults.

Owns the words. `setup.py` makes of them what is simulated.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from scheduler_svc.core.messages.config import MAX_LANES, Admission
from scheduler_svc.simulator.cost.hardware import MACHINES, MODELS
from scheduler_svc.simulator.report.comparison import POLICIES
from scheduler_svc.simulator.workload.lengths import GRAMMAR, Lengths, parse_lengths
from scheduler_svc.simulator.workload.synthetic import Spacing
from scheduler_svc.simulator.workload.traces import TraceFormat

DESCRIPTION = """\
Runs the scheduler's real core on virtual time, with a cost model in place of the worker, and says what to expect:
latencies, throughput, memory, waste. Requests come from a trace or are drawn at random. With --memory LAYOUT it is the
KV-cache lab instead: tandem simulate --memory paged --help."""

# A group's own way to take a flag in.
Adder = Callable[..., argparse.Action]

_MANY = 100_000_000


def parser() -> argparse.ArgumentParser:
    """Of everything but the lab."""
    made = argparse.ArgumentParser(prog="tandem simulate", description=DESCRIPTION, allow_abbrev=False)
    _add_requests(made.add_argument_group("requests").add_argument)
    _add_service(made.add_argument_group("machine and model").add_argument)
    _add_policy(made.add_argument_group("the core").add_argument)
    _add_output(made.add_argument_group("what to find out").add_argument)
    return made


def _add_requests(add: Adder) -> None:
    add("--trace", type=Path, metavar="FILE", help="Mooncake's JSONL or Azure's CSV; else synthetic")
    add("--trace-format", type=TraceFormat, choices=list(TraceFormat), help="default: by the first line")
    add(
        "--requests",
        type=_whole(1, _MANY),
        metavar="N",
        help="the first N of the trace, all of them unless told; synthetic: 1,000",
    )
    add(
        "--rate",
        type=_number(1e-6, 1e9),
        metavar="R",
        help="requests per second on average; default: the trace's own; synthetic: 1",
    )
    add(
        "--concurrency",
        type=_whole(1, 1_000_000),
        metavar="N",
        help="the next request comes when fewer than N live, whatever its time",
    )
    add(
        "--arrivals",
        type=Spacing,
        choices=list(Spacing),
        default=Spacing.POISSON,
        help="synthetic: how they follow each other (poisson)",
    )
    add(
        "--burstiness",
        type=_number(0.1, 100),
        default=3.0,
        metavar="CV",
        help="bursty: standard deviation of the gaps over their mean (3)",
    )
    add(
        "--input",
        type=_lengths,
        default="lognormal:512:0.8",
        metavar="LENGTHS",
        help=f"synthetic: prompt tokens beside the prefix: {GRAMMAR} (lognormal:512:0.8)",
    )
    add(
        "--output",
        type=_lengths,
        default="lognormal:128:0.8",
        metavar="LENGTHS",
        help="synthetic: output tokens (lognormal:128:0.8)",
    )
    add(
        "--prefix-groups",
        type=_whole(0, 1_000_000),
        default=0,
        metavar="N",
        help="synthetic: each prompt starts with one of N prefixes",
    )
    add("--prefix-tokens", type=_whole(0, 1_000_000), default=1024, metavar="N", help="tokens of such a prefix (1,024)")
    add(
        "--tenants",
        type=_whole(1, 100_000),
        default=1,
        metavar="N",
        help="synthetic: requests are of N tenants, who share no pages with each other",
    )
    add(
        "--greedy-share",
        type=_number(0, 1),
        default=0.0,
        metavar="SHARE",
        help="the first tenant sends this share of all requests (0: tenants are alike)",
    )
    add(
        "--max-new-tokens",
        type=_whole(0, 1_000_000),
        default=2048,
        metavar="N",
        help="what callers ask for; they end by EOS where the trace says (2,048); "
        "0: they ask for exactly what they get",
    )
    add("--seed", type=_whole(0, 1 << 62), default=0, help="of all that is drawn (0)")


def _add_service(add: Adder) -> None:
    add("--machine", default="h100", help=f"{', '.join(MACHINES)} (h100)")
    add("--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)} (llama-3.1-8b)")
    add("--devices", type=_whole(1, 64), default=1, metavar="N", help="of one worker, tensor parallel (1)")
    add("--workers", type=_whole(1, MAX_LANES), default=1, metavar="N", help="alike (1)")
    add("--value-bytes", type=_whole(1, 4), default=2, metavar="N", help="per weight and cache entry (2)")
    add(
        "--fit", type=Path, metavar="FILE", help="step times from a run recorded with --steps, instead of the machine's"
    )
    add("--page-size", type=_whole(1, 1024), default=128, metavar="N", help="tokens per page (128)")
    add(
        "--num-pages",
        type=_whole(2, 1 << 30),
        metavar="N",
        help="per worker; default: what 90 %% of the memory holds beside the weights",
    )
    add("--host-pages", type=_whole(0, 1 << 30), default=0, metavar="N", help="in host memory (0)")
    add("--max-rows", type=_whole(1, 65536), default=256, metavar="N", help="sequences at once (256)")
    add("--max-length", type=_whole(2, 10_000_000), metavar="N", help="default: the model's")
    add("--token-budget", type=_whole(1, 1 << 20), default=4096, metavar="N", help="per step (4,096)")
    add("--chunk-align", type=_whole(1, 4096), default=128, metavar="N", help="of prompt chunks (128)")
    add("--flops-efficiency", type=_number(0.01, 1), default=0.6, metavar="SHARE", help="(0.6)")
    add("--bandwidth-efficiency", type=_number(0.01, 1), default=0.8, metavar="SHARE", help="(0.8)")
    add("--overhead-us", type=_number(0, 1e9), default=500.0, metavar="US", help="per step (500)")
    add("--link-us", type=_number(0, 1e9), default=100.0, metavar="US", help="between core and worker, each way (100)")


def _add_policy(add: Adder) -> None:
    flag = argparse.BooleanOptionalAction
    add("--mixed-steps", action=flag, default=True, help="prompts and decodes share a step")
    add(
        "--admission",
        type=Admission,
        choices=list(Admission),
        default=Admission.HORIZON,
        help="what must be free beyond a request's own tokens (horizon)",
    )
    add("--cache-aware", action=flag, default=True, help="who finds more of its prompt kept goes first")
    add("--fair-share", action=flag, default=True, help="tenants share the service alike")
    add("--prefix-sharing", action=flag, default=True, help="requests share pages of equal prompts")
    add("--plans-in-flight", type=_whole(1, 8), default=2, metavar="N", help="(2)")
    add("--max-waiting", type=_whole(1, _MANY), default=1024, metavar="N", help="requests; more are rejected (1,024)")
    add("--max-waiting-tokens", type=_whole(1, 1 << 40), metavar="N", help="default: the service's 4,194,304")


def _add_output(add: Adder) -> None:
    add("--json", action="store_true", help="one object instead of the table")
    add("--steps", type=Path, metavar="FILE", help="write a line per step, which tandem plot draws")
    add("--compare", choices=list(POLICIES), help="the same requests under each value of one policy, side by side")
    add("--find-rate", action="store_true", help="find how many requests per second keep TTFT p99 under --ttft-p99")
    add("--ttft-p99", type=_number(1e-6, 1e6), metavar="SECONDS", help="the goal of --find-rate")
    add(
        "--precision",
        type=_number(0.001, 1),
        default=0.05,
        metavar="SHARE",
        help="how near the rate that holds is to one that fails (0.05)",
    )
    add("--probes", type=_whole(1, 100), default=16, metavar="N", help="simulations at most (16)")
    add(
        "--write-trace",
        type=Path,
        metavar="FILE",
        help="write a made-up trace of the size and format of Mooncake's, and end",
    )


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return value

    return read


def _number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
        return value

    return read


def _lengths(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
