"""Measures takeovers: `python -m tests.measure.takeover [--json] [--kills N] [--standbys N] [--worker FLAGS]`.

Kills the serving worker of one service N times. Owns the order of the rounds, the bars and the report.
"""

import argparse
import asyncio
import sys
from typing import Any

from tests.measure.harness import Bar, Measurement, spread, words
from tests.measure.takeover.rounds import NUM_STREAMS, service, takeover

# Seconds from the kill: the median of the first token of any stream, and of the last stream.
BAR_FIRST, BAR_LAST = 0.3, 1.0
FIGURES = ("first_seconds", "last_seconds", "longest_pause_seconds", "recomputed_tokens", "standby_again_seconds")


async def measured(args: argparse.Namespace, count: int, *, is_planned: bool = False) -> list[dict[str, Any]]:
    """The takeovers of one service, one after the other."""
    async with service(args.standbys, args.worker, has_door=args.door) as client:
        found: list[dict[str, Any]] = []
        for number in range(count):
            found.append(await takeover(client, args.standbys, is_planned=is_planned))
            figures = words({name: found[-1][name] for name in FIGURES})
            print(f"{'hand-over' if is_planned else 'kill'} {number + 1}: {figures}", file=sys.stderr)
        return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The spread of each figure, and the number of texts that differ from the first round's."""
    return {
        "kills": len(found),
        "streams": NUM_STREAMS,
        **{name: spread([one[name] for one in found]) for name in FIGURES},
        "texts_that_differ": sum(
            text != first for one in found[1:] for text, first in zip(one["texts"], found[0]["texts"], strict=True)
        ),
    }


def main() -> int:
    measurement = Measurement("takeover")
    measurement.flag("--kills", type=int, default=50)
    measurement.flag("--drains", type=int, default=10, help="planned hand-overs that are measured beside the kills")
    measurement.flag("--standbys", type=int, default=1)
    measurement.flag("--door", action="store_true", help="callers use TLS and a token")
    measurement.flag("--worker", default="", help='more flags of the workers, such as "--threads 1"')
    args = measurement.begin()
    found = asyncio.run(measured(args, args.kills))
    result = summary(found)
    measurement.line(result)
    if args.drains:
        pauses = spread(
            [one["longest_pause_seconds"] for one in asyncio.run(measured(args, args.drains, is_planned=True))]
        )
        measurement.line({"planned_hand_overs": args.drains, "longest_pause_seconds": pauses})
    first, last = result["first_seconds"]["median"], result["last_seconds"]["median"]
    measurement.bar(
        Bar(name="seconds from the kill to the first token of any stream", value=first, limit=BAR_FIRST),
        Bar(name="seconds from the kill to the first token of the last stream", value=last, limit=BAR_LAST),
    )
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
