"""What the gateway costs: `python -m tests.measure.gateway [--json] [--rounds N] [cpu] [ttft] [attack]`.

All have a fake service, so that nothing else is measured. `cpu`: its CPU time per message of one token. `ttft`: the
time to the first token through the gateway and by gRPC, in turns, beside 256 slow streams through the gateway.
`attack`: streams and new calls of a caller with a token, with and without callers that have none and send all they can.
"""

import argparse
import json
from typing import Any

from tests.measure.gateway import attack, cpu, ttft
from tests.measure.machine import description


def main() -> int:
    """Returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.gateway", allow_abbrev=False)
    parser.add_argument("what", nargs="*", default=["cpu", "ttft", "attack"])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream and round")
    args = parser.parse_args()
    found = list[dict[str, Any]]()
    if "cpu" in args.what:
        found.append(cpu.measure(0.0, rounds=args.rounds, tokens=args.tokens))
        found.append(cpu.measure(cpu.PACED_RATE, rounds=args.rounds, tokens=args.tokens // 2))
    if "ttft" in args.what:
        found.append(ttft.measure())
    if "attack" in args.what:
        found.append(attack.measure(rounds=min(args.rounds, 3)))
    about = description()
    print(json.dumps(about) if args.json else ", ".join(f"{name} {value}" for name, value in about.items()))
    for one in found:
        print(json.dumps(one) if args.json else ", ".join(f"{name} {value}" for name, value in one.items()))
    return 0 if all(one["met"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
