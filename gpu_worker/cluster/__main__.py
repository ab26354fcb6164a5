"""`python -m gpu_worker.cluster`: places workers on a Ray cluster, shows them, changes their number, ends them.

Owns the commands' output and exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

from gpu_worker.cluster.arguments import fleet_of_flags, parse
from gpu_worker.cluster.fleet import FleetRefused
from gpu_worker.cluster.head import HeadFailed, node_hint, start_head, use_token
from gpu_worker.cluster.reports import FAILED_STATES, Report, State, line_of, summary_of

_LOOK_SECONDS = 0.5
_NEEDS_RAY = "it needs Ray: pip install 'tandem-inference[ray]', on every node of the cluster"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        parsed = parse(arguments)
        if parsed.command == "up":
            # Checked before anything is started.
            parsed.fleet = fleet_of_flags(parsed)
    except FleetRefused as error:
        return _failed(str(error), 2)
    if importlib.util.find_spec("ray") is None:
        return _failed(_NEEDS_RAY, 1)
    if parsed.command == "head":
        return _head(parsed)
    use_token(os.environ)
    from gpu_worker.cluster import ray_workers

    try:
        ray_workers.connect(parsed.address, parsed.name)
        return _COMMANDS[parsed.command](parsed)
    except ray_workers.ClusterFailed as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        print("interrupted; the workers go on, and `status` shows them", file=sys.stderr)
        return 130
    finally:
        ray_workers.disconnect()


def _failed(why: str, code: int) -> int:
    print(f"gpu_worker.cluster: {why}", file=sys.stderr)
    return code


def _head(parsed: argparse.Namespace) -> int:
    try:
        address = start_head(parsed.port)
    except HeadFailed as error:
        return _failed(str(error), 1)
    print(
        f"the head of a cluster runs at {address}; `ray stop` ends it\n"
        f"on each other node, with a copy of ~/.ray/auth_token (mode 0600):\n  {node_hint(address)}"
    )
    return 0


def _up(parsed: argparse.Namespace) -> int:
    from gpu_worker.cluster import ray_workers

    if existing := ray_workers.numbers(parsed.name):
        return _failed(f"{len(existing)} workers of {parsed.name} are up: `scale N` changes their number", 1)
    ray_workers.place(parsed.fleet, range(parsed.workers), parsed.place_seconds)
    return _watch(parsed)


def _scale(parsed: argparse.Namespace) -> int:
    from gpu_worker.cluster import ray_workers

    existing = ray_workers.numbers(parsed.name)
    fleet = ray_workers.fleet_of(parsed.name)
    ray_workers.end(parsed.name, existing[parsed.workers :])
    free = (number for number in range(len(existing) + parsed.workers) if number not in existing)
    new = [next(free) for _ in range(parsed.workers - len(existing))]
    if new:
        ray_workers.place(fleet, new, parsed.place_seconds)
    return _watch(parsed)


def _down(parsed: argparse.Namespace) -> int:
    from gpu_worker.cluster import ray_workers

    existing = ray_workers.numbers(parsed.name)
    ray_workers.end(parsed.name, existing)
    print(f"{len(existing)} workers of {parsed.name} ended")
    return 0


def _retry(parsed: argparse.Namespace) -> int:
    from gpu_worker.cluster import ray_workers

    found = ray_workers.retry(parsed.name)
    print(f"started again: {', '.join(f'worker {number}' for number in found) or 'none was given up'}")
    return 0


def _status(parsed: argparse.Namespace) -> int:
    from gpu_worker.cluster import ray_workers

    found = ray_workers.reports(parsed.name)
    for report in found:
        print(json.dumps(report.plain()) if parsed.json else line_of(report))
    if not parsed.json:
        print(summary_of(found))
    return 0 if found and all(report.state == State.SERVING for report in found) else 1


def _watch(parsed: argparse.Namespace) -> int:
    """Prints what changes until all workers serve, one has failed, or the time is over."""
    from gpu_worker.cluster import ray_workers

    until = time.monotonic() + parsed.wait_seconds
    shown: dict[int, tuple[State, str]] = {}
    while True:
        found = ray_workers.reports(parsed.name)
        for report in found:
            if shown.get(report.number) != (now := (report.state, report.cause)):
                shown[report.number] = now
                print(line_of(report), flush=True)
        if _is_settled(found) or time.monotonic() > until:
            print(summary_of(found))
            return 0 if all(report.state == State.SERVING for report in found) else 1
        time.sleep(_LOOK_SECONDS)


def _is_settled(found: Sequence[Report]) -> bool:
    return all(report.state == State.SERVING or report.state in FAILED_STATES for report in found)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "scale": _scale,
    "down": _down,
    "retry": _retry,
    "status": _status,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
