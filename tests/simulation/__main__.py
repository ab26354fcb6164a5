"""Runs an episode again, or episodes for a while: `python -m tests.simulation SEED [--seconds N]`."""

import argparse
import time

from tests.simulation.episode import Episode


def main() -> None:
    """Ends with the failing episode's traceback and seed, or with a line of how many went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the first episode's seed")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with the seeds that follow for so long")
    args = parser.parse_args()
    started, num_episodes, num_events = time.monotonic(), 0, 0
    while not num_episodes or time.monotonic() - started < args.seconds:
        episode = Episode(args.seed + num_episodes)
        episode.run()
        num_episodes += 1
        num_events += len(episode.log)
    print(f"{num_episodes} episodes, {num_events} events, {time.monotonic() - started:.1f} s: all promises held")


if __name__ == "__main__":
    main()
