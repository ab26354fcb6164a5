"""`python -m scheduler_svc.recording.replay FILE`: passes a recorded event log to a new core and compares effects.

Owns nothing. With --audit the core's invariants are checked after every event. Exit code 1 at the first difference.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
from pathlib import Path

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import event_log
from scheduler_svc.wire.arrays import WireError


def replay(path: Path, *, audited: bool) -> int:
    """Returns the number of events. Raises SystemExit if the effects differ from those recorded."""
    config, entries = event_log.read(path)
    core, digest = Scheduler(config), event_log.EffectsDigest()
    count, before = 0, "start"
    for entry in entries:
        if digest.value() != entry.effects_digest:
            raise SystemExit(f"event {count} (after {before}): the effects differ from those recorded")
        before = entry.WhichOneof("event")
        if before is None:
            break
        count += 1
        digest.add(core.handle(event_log.event_of(entry), entry.now))
        if audited:
            audit(core)
    return count


def main() -> None:
    """Parses the command line, replays, and prints the result."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.recording.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="file that --record wrote")
    parser.add_argument("--audit", action="store_true", help="check the core's invariants after every event")
    arguments = parser.parse_args()
    try:
        count = replay(arguments.file, audited=arguments.audit)
    except (OSError, WireError) as error:
        raise SystemExit(f"replay: {arguments.file} cannot be read as an event log: {error}") from None
    print(f"{count} events gave the same effects")


if __name__ == "__main__":
    main()
