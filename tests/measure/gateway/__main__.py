"""What the gateway costs: `python -m tests.measure.gateway [--json] [--rounds N] [cpu] [ttft] [attack]`.

All have a fake service, so that nothing else is measured. Each is a module, which says what it measures.
"""

from tests.measure.gateway import attack, cpu, ttft
from tests.measure.harness import Measurement


def main() -> int:
    measurement = Measurement("gateway")
    measurement.flag("what", nargs="*", default=["cpu", "ttft", "attack"])
    measurement.flag("--rounds", type=int, default=5)
    measurement.flag("--tokens", type=int, default=400, help="of each stream and round")
    args = measurement.begin()
    if "cpu" in args.what:
        for rate, tokens in ((0.0, args.tokens), (cpu.PACED_RATE, args.tokens // 2)):
            cpu.measure(measurement, rate, rounds=args.rounds, tokens=tokens)
    if "ttft" in args.what:
        ttft.measure(measurement)
    if "attack" in args.what:
        attack.measure(measurement, rounds=min(args.rounds, 3))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
