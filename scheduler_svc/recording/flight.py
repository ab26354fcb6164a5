"""The flight recorder of one core: fills the ring, and writes it to a file when something dies.

Owns when a file is written. A thread writes, in small pieces, because 6,000 entries take some 30 ms, and the core is
needed most when something has just died.

`python -m scheduler_svc.recording.flight FILE` prints such a file as a timeline.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.observer import Observer
from scheduler_svc.recording import flight_files
from scheduler_svc.recording.flight_ring import Entry, Ring, members
from tandem_contract.logs import escaped
from tandem_contract.needed import started
from tandem_contract.plural import numbered
from tandem_contract.version import version
from tandem_contract.writing import Trouble

log = logging.getLogger("tandem.flight")

FORMAT = 1
# The file is written this long after a death, so that it shows what followed.
_AFTER_SECONDS = 1.0
# Deaths within this time after a file are in the next file together, so a crash loop fills no disk.
_BETWEEN_SECONDS = 10.0
_MAX_CAUSES = 16
# The most causes in the log's line.
_NAMED_CAUSES = 3
# Entries that are written before the thread lets others run, which takes 0.2 ms.
_AT_ONCE = 32


class FlightRecorder(Observer):
    """Writes to `path`, a folder. It never raises: the service goes on without a recorder that fails."""

    def __init__(self, path: Path, *, keep_tokens: bool = False) -> None:
        self._path = path
        self._ring = Ring(keep_tokens=keep_tokens)
        self._keeps_tokens = keep_tokens
        self._causes: list[str] = []
        self._due_at: float | None = None  # on the core's clock
        self._not_before = 0.0
        self._number = 0
        self._writing: threading.Thread | None = None
        self._trouble = Trouble(log, "the flight recorder's folder", path, "the service continues without its files")
        self._is_broken = self._is_stopping = False

    def handled(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        # Most ticks have none.
        if self._is_broken or (not effects and isinstance(event, ev.Tick)):
            return
        try:
            self._ring.add(now, event, effects)
        except Exception:
            self._is_broken = True
            log.exception("the flight recorder failed and is off")
        if self._ring.deaths:
            self._died(now)
        if isinstance(event, ev.DrainStarted):
            # Front ends and workers end in order from now on.
            self._is_stopping = True

    def checked(self, now: float) -> None:
        if self._due_at is None:
            return
        flight_files.collect_crashes(self._path)
        if now < self._due_at or (self._writing is not None and self._writing.is_alive()):
            return
        arguments = (self._ring.entries(), self._causes, now, True)
        writing = threading.Thread(target=self._write, args=arguments, name="flight recorder", daemon=True)
        try:
            self._writing = started(writing)
        except OSError:
            self._due_at = now + _AFTER_SECONDS
            return
        self._not_before, self._due_at, self._causes = now + _BETWEEN_SECONDS, None, []

    def close(self) -> None:
        """Writes a file that is due, and waits for the one that is being written."""
        if self._writing is not None:
            self._writing.join()
        if self._due_at is not None:
            causes, self._causes, self._due_at = self._causes, [], None
            self._write(self._ring.entries(), causes, time.monotonic(), False)
        flight_files.collect_crashes(self._path)

    @contextmanager
    def guarding(self, *expected: type[Exception]) -> Generator[None]:
        """Writes a file if the body raises an exception that is not expected, and stacks at a fatal signal.

        First reports what earlier processes left.
        """
        flight_files.collect_crashes(self._path)
        flight_files.catch_fatal_signals(self._path, "core")
        try:
            yield
        except expected:
            raise
        except Exception as error:
            # The log has the error's text, which may quote anything.
            [*_, last] = traceback.extract_tb(error.__traceback__) or [None]
            place = "" if last is None else f" in {Path(last.filename).name}:{last.lineno}"
            self._causes.append(f"the core raised {type(error).__name__}{place}")
            self._due_at = 0.0
            self.close()
            raise

    def _died(self, now: float) -> None:
        causes = [*self._causes, *self._ring.deaths]
        self._ring.deaths.clear()
        if self._is_stopping:
            return
        self._causes = causes[:_MAX_CAUSES]
        if self._due_at is None:
            self._due_at = max(now + _AFTER_SECONDS, self._not_before)

    def _write(self, entries: list[Entry], why: list[str], now: float, is_background: bool) -> None:
        self._number += 1
        header = {
            "kind": "flight",
            "format": FORMAT,
            "version": version(),
            "pid": os.getpid(),
            "unix_time": time.time(),
            "at": now,
            "causes": why,
            "has_tokens": self._keeps_tokens,
        }
        try:
            with flight_files.created(self._path, self._number) as file:
                file.write(f"{json.dumps(header)}\n".encode())
                for start in range(0, len(entries), _AT_ONCE):
                    lines = [json.dumps(dict(members(entry))) for entry in entries[start : start + _AT_ONCE]]
                    file.write("".join(f"{line}\n" for line in lines).encode())
                    if is_background:
                        time.sleep(1e-3)
        except OSError as error:
            log.error("%s; the last events are not kept", why[0])
            self._trouble.failed(error)
            return
        self._trouble.worked()
        more = f" and {len(why) - _NAMED_CAUSES} more" if len(why) > _NAMED_CAUSES else ""
        shown = ", ".join(why[:_NAMED_CAUSES])
        log.warning("%s%s: the last %s in %s", shown, more, numbered(len(entries), "event", "are"), file.name)


class FlightFileError(Exception):
    """The file is not one of the flight recorder."""


def lines(path: Path) -> Iterator[str]:
    """Yields a line with the cause, then one per entry: seconds before the file was written, kind, values.

    Streams are shown with their request's id where the file has its beginning. Raises OSError, FlightFileError.
    """
    with path.open(encoding="utf-8") as file:
        header, *entries = [_parsed(line) for line in file] or [{}]
    if header.get("kind") != "flight" or header.get("format") != FORMAT:
        raise FlightFileError("it is not a file of this version's flight recorder")
    written = datetime.fromtimestamp(header["unix_time"]).isoformat(" ", "milliseconds")
    yield f"{written}, process {header['pid']}: {'; '.join(header['causes'])}"
    requests: dict[tuple[str, int], str] = {}
    for entry in entries:
        at, kind = entry.pop("at") - header["at"], entry.pop("kind")
        if "request_id" in entry and "stream" in entry:
            for idx in range(entry.get("samples", 1)):
                requests[entry["frontend"], entry["stream"] + idx] = entry["request_id"]
        elif (name := requests.get((entry.get("frontend", ""), entry.get("stream", -1)))) is not None:
            entry["request_id"] = name
        shown = (f"{name} {value}" for name, value in entry.items() if value not in ("", [], None))
        yield f"{at:12.6f}  {kind:<16} {', '.join(shown)}"


def _parsed(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, RecursionError):
        raise FlightFileError("it has a line that is not a JSON object; was its process killed?") from None


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
