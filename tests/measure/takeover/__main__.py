"""Measures takeovers: `python -m tests.measure.takeover [--json] [--kills N] [--standbys N] [--worker FLAGS]`.

Kills the serving worker of one service N times. Owns the order of the rounds, the bars and the report.
"""

import argparse
import asyncio
import sys
from typing import Any

from tests.measure.harness import Bar, Measurement, spread
from tests.measure.takeover.rounds import KNOWN_TOKENS, NUM_STREAMS, Takeover, service, takeover

# Seconds from the kill: the median of the first token of any stream, and of the last stream.
BAR_FIRST, BAR_LAST = 0.3, 1.0


async def measured(args: argparse.Namespace, count: int, *, is_planned: bool = False) -> list[Takeover]:
    """The takeovers of one service, one after the other."""
    async with service(args.standbys, args.worker, has_door=args.door) as client:
        found: list[Takeover] = []
        for number in range(count):
            found.append(await takeover(client, args.standbys, is_planned=is_planned))
            one, kind = found[-1], "hand-over" if is_planned else "kill"
            line = f"{kind} {number + 1}: first {one.first:.3f} s, last {one.last:.3f} s, "
            line += f"{one.recomputed_tokens} of {one.known_tokens} tokens recomputed"
            print(f"{line}, on standby again after {one.standby_again:.1f} s", file=sys.stderr)
        return found


def summary(found: list[Takeover]) -> dict[str, Any]:
    """The spread of each figure, and the number of texts that differ from the first round's."""
    return {
        "kills": len(found),
        "streams": NUM_STREAMS,
        "known_tokens_per_stream": KNOWN_TOKENS,
        "first_seconds": spread([one.first for one in found]),
        "last_seconds": spread([one.last for one in found]),
        "longest_pause_seconds": spread([one.pause for one in found]),
        "recomputed_tokens": spread([float(one.recomputed_tokens) for one in found]),
        "standby_again_seconds": spread([one.standby_again for one in found]),
        "texts_that_differ": sum(
            text != first for one in found[1:] for text, first in zip(one.texts, found[0].texts, strict=True)
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
        pauses = spread([one.pause for one in asyncio.run(measured(args, args.drains, is_planned=True))])
        measurement.line({"planned_hand_overs": args.drains, "longest_pause_seconds": pauses})
    first, last = result["first_seconds"]["median"], result["last_seconds"]["median"]
    measurement.bar(
        Bar(name="seconds from the kill to the first token of any stream", value=first, limit=BAR_FIRST),
        Bar(name="seconds from the kill to the first token of the last stream", value=last, limit=BAR_LAST),
    )
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
