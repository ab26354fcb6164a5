"""Reads a file of the flight recorder and makes lines for people. Owns the text of a line."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from scheduler_svc.recording.flight.recorder import FORMAT

Entry = dict[str, Any]


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


def _parsed(line: str) -> Entry:
    try:
        return dict(json.loads(line))
    except ValueError:
        raise FlightFileError("it has a line that is no JSON object; was its process killed?") from None
