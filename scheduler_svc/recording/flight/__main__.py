"""`python -m scheduler_svc.recording.flight FILE`: prints a file of the flight recorder as a timeline."""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import os
import sys
from pathlib import Path

from scheduler_svc.recording.flight.timeline import FlightFileError, lines
from tandem_contract.logs import escaped


def main() -> None:
    """Prints the lines. Ends with a message if the file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.recording.flight", description=__doc__)
    parser.add_argument("file", type=Path, help="file that the log names")
    path = parser.parse_args().file
    try:
        for line in lines(path):
            print(escaped(line))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, FlightFileError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None


if __name__ == "__main__":
    main()
