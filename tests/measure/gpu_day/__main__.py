"""`python -m tests.measure.gpu_day [PART …]`: correctness and speed on a GPU machine that is at hand for half an hour.

Each part has a process of its own and a time limit; results are written after every entry, so that a command that is
killed leaves what was done. Exit code 1 if a part failed or was stopped. `make gpu-day` calls it.
"""

import argparse
import sys
import time
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from tests.measure import machine
from tests.measure.gpu_day.part_table import BY_NAME, CORE, PARTS
from tests.measure.gpu_day.processes import Request, context, run_part
from tests.measure.gpu_day.report import SUMMARY, Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.measure.gpu_day", description=__doc__, allow_abbrev=False)
    every = ", ".join(part.name for part in PARTS)
    parser.add_argument("names", nargs="*", metavar="PART", help=f"{every}, or all; default: {', '.join(CORE)}")
    parser.add_argument("--device", default="cuda", help="cuda or cpu; default: cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and few requests, which a CPU can run")
    parser.add_argument("--plain-attention", action="store_true", help="with --tiny: attention that compiles nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-day"), help="folder of the results; default: gpu-day")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no part after this time; default: 30")
    parser.add_argument("--flex-nano-vllm", default="", metavar="DIR", help="a checkout, which peers measures too")
    arguments = parser.parse_args()
    names: list[str] = arguments.names or list(CORE)
    names = list(BY_NAME) if names == ["all"] else names
    if unknown := [name for name in names if name not in BY_NAME]:
        parser.error(f"no part {', '.join(unknown)}; there are {every}")
    report = Report(arguments.out, _about(arguments.device, arguments.tiny))
    if arguments.plain_attention and not (arguments.tiny and arguments.device == "cpu"):
        parser.error("--plain-attention needs --tiny and --device cpu")
    request = Request(
        device=arguments.device,
        tiny=arguments.tiny,
        flex_nano_vllm=arguments.flex_nano_vllm,
        plain_attention=arguments.plain_attention,
    )
    ends_at = time.monotonic() + arguments.minutes * 60
    making = context(arguments.device)
    for name in names:
        _run(name, request, report, ends_at - time.monotonic(), making)
    print((arguments.out / SUMMARY).read_text())
    return 0 if report.all_passed(names) else 1


def _run(name: str, request: Request, report: Report, left: float, making: BaseContext) -> None:
    part = BY_NAME[name]
    print(f"\n== {name}: {part.about}", flush=True)
    if left <= 0:
        report.update(name, "not begun: the time was over", 0.0, {})
        return
    # A CPU compiles a kernel in half a minute, once; the limits are a GPU's.
    limit = left if request.device == "cpu" else min(part.limit_seconds, left)
    run_part(making, part, request, limit, partial(report.update, name))
    print(f"== {name}: {report.parts[name]['outcome']}, {report.parts[name]['seconds']} s", flush=True)


def _about(device: str, tiny: bool) -> dict[str, Any]:
    """The machine. Torch is not imported here, so the GPU's name comes from the parts."""
    words = {**machine.description(), **machine.versions()}
    return {"device": device, "tiny": tiny, **words}


if __name__ == "__main__":
    sys.exit(main())
