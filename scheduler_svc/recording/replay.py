"""`python -m scheduler_svc.recording.replay FILE`: passes a recorded event log to a new core and compares effects.

Owns nothing. With --audit the core's invariants are checked after every event. With --convert NEW a log of version 5
that has the same effects is written in this version. Exit code 1 at the first difference.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
from contextlib import closing, nullcontext
from pathlib import Path

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import event_log
from tandem_contract.bounds import WireError
from tandem_contract.plural import numbered


def replay(path: Path, *, audited: bool = False, converted: Path | None = None) -> int:
    """Returns the number of events; writes the log to `converted` in this version.

    Raises SystemExit if the effects differ from those recorded; `converted` then ends with the last equal event.
    """
    config, digest, entries = event_log.read(path)
    core, count, before = Scheduler(config), 0, "start"
    with nullcontext() if converted is None else closing(event_log.Recorder(converted, config)) as recorder:
        for entry in entries:
            if digest.value() != entry.effects_digest:
                raise SystemExit(f"event {count} (after {before}): the effects differ from those recorded")
            before = entry.WhichOneof("event")
            if before is None:
                break
            count += 1
            event = event_log.event_of(entry)
            effects = core.handle(event, entry.now)
            digest.add(effects)
            if recorder is not None:
                recorder.arrived(entry.now, event, {"peer": entry.peer, before: getattr(entry, before)})
                recorder.handled(entry.now, event, effects)
            if audited:
                audit(core)
    return count


def main() -> None:
    """Parses the command line, replays, and prints the result."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.recording.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="file that --record wrote")
    parser.add_argument("--audit", action="store_true", help="check the core's invariants after every event")
    parser.add_argument("--convert", type=Path, metavar="NEW", help="write the log to this file in this version")
    arguments = parser.parse_args()
    try:
        count = replay(arguments.file, audited=arguments.audit, converted=arguments.convert)
    except FileExistsError as error:
        raise SystemExit(f"replay: {error.filename} exists; choose another name") from None
    except (OSError, WireError) as error:
        raise SystemExit(f"replay: {arguments.file} cannot be read as an event log: {error}") from None
    print(f"{numbered(count, 'event')} gave the same effects")


if __name__ == "__main__":
    main()
