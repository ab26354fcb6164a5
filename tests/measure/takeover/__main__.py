"""Measures takeovers: `python -m tests.measure.takeover [--json] [--kills N] [--standbys N] [--worker FLAGS]`.

Kills the serving worker of one service N times. Owns the order of the rounds, the bars and the report.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from statistics import median
from typing import Any

from tests.measure.machine import description, versions
from tests.measure.takeover.rounds import KNOWN_TOKENS, NUM_STREAMS, Takeover, service, takeover

# Seconds from the kill: the median of the first token of any stream, and of the last stream.
BAR_FIRST, BAR_LAST = 0.3, 1.0


async def planned(drains: int, standbys: int, worker_flags: str, *, has_door: bool) -> list[float]:
    """The longest pause of a stream in each of `drains` planned hand-overs of one service."""
    async with service(standbys, worker_flags, has_door=has_door) as client:
        return [(await takeover(client, standbys, is_planned=True)).pause for _ in range(drains)]


async def measured(kills: int, standbys: int, worker_flags: str, *, has_door: bool) -> list[Takeover]:
    """The takeovers of one service, one after the other."""
    async with service(standbys, worker_flags, has_door=has_door) as client:
        found: list[Takeover] = []
        for number in range(kills):
            found.append(await takeover(client, standbys))
            one = found[-1]
            line = f"kill {number + 1}: first {one.first:.3f} s, last {one.last:.3f} s, "
            line += f"{one.recomputed_tokens} of {one.known_tokens} tokens recomputed"
            print(f"{line}, on standby again after {one.standby_again:.1f} s", file=sys.stderr)
        return found


def summary(found: list[Takeover]) -> dict[str, Any]:
    """Median, least and most of each figure, and the number of texts that differ from the first round's."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": median(values), "least": min(values), "most": max(values)}

    return {
        "kills": len(found),
        "streams": NUM_STREAMS,
        "known_tokens_per_stream": KNOWN_TOKENS,
        "first_seconds": spread([one.first for one in found]),
        "last_seconds": spread([one.last for one in found]),
        "recomputed_tokens": spread([float(one.recomputed_tokens) for one in found]),
        "standby_again_seconds": spread([one.standby_again for one in found]),
        "texts_that_differ": sum(
            text != first for one in found[1:] for text, first in zip(one.texts, found[0].texts, strict=True)
        ),
    }


def main() -> None:
    """Exits with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.takeover", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--drains", type=int, default=10, help="planned hand-overs that are measured beside the kills")
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--door", action="store_true", help="callers use TLS and a token")
    parser.add_argument("--worker", default="", help='more flags of the workers, such as "--threads 1"')
    args = parser.parse_args()
    found = asyncio.run(measured(args.kills, args.standbys, args.worker, has_door=args.door))
    result = summary(found)
    pauses = asyncio.run(planned(args.drains, args.standbys, args.worker, has_door=args.door)) if args.drains else []
    result["planned_pause_seconds"] = pauses
    first, last = result["first_seconds"], result["last_seconds"]
    if args.json:
        rounds = [{**dataclasses.asdict(one), "texts": None} for one in found]
        print(json.dumps({"machine": description(), "versions": versions(), **result, "rounds": rounds}))
    else:
        print(f"{len(found)} kills under {NUM_STREAMS} streams of {KNOWN_TOKENS} known tokens; seconds after the kill")
        for name, times, bar in (
            ("first token of any stream", first, BAR_FIRST),
            ("of the last stream", last, BAR_LAST),
        ):
            line = f"  {name:<27} {times['median']:.3f}  ({times['least']:.3f} to {times['most']:.3f})"
            print(f"{line}; bar {bar:g}")
        again, recomputed = result["standby_again_seconds"], result["recomputed_tokens"]
        line = f"  {'a worker on standby again':<27} {again['median']:.1f}"
        print(f"{line}    ({again['least']:.1f} to {again['most']:.1f})")
        print(f"  {recomputed['median']:.0f} tokens recomputed ({recomputed['least']:.0f} to {recomputed['most']:.0f})")
        pause = median(one.pause for one in found)
        if pauses:
            line = f"{median(pauses):.3f}  ({min(pauses):.3f} to {max(pauses):.3f}) in {len(pauses)} planned hand-overs"
            print(f"  longest pause of a stream   {line}; {pause:.3f} with a kill")
        print(f"  {result['texts_that_differ']} texts differ from those of the first round")
    sys.exit(first["median"] > BAR_FIRST or last["median"] > BAR_LAST)


if __name__ == "__main__":
    main()
