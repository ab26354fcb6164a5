"""Reads and makes the lines that the services print: their log, as text or JSON, and the output of libraries."""

import datetime
import json
import os
import re
from dataclasses import dataclass
from typing import Any, cast

# 2026-11-22 02:12:58.026 core INFO message
_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?P<process>\S+) (?P<level>[A-Z]+) (?P<message>.*)")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `process` and `level` are empty if it is not a line of the log."""

    process: str
    level: str
    message: str


def parse(line: str) -> LogLine:
    """Returns the parts of a line in either format. A line of neither format becomes the message."""
    found = _TEXT.fullmatch(line)
    if found is not None:
        return LogLine(found["process"], found["level"], found["message"])
    if line.startswith("{"):
        try:
            record = cast(dict[str, Any], json.loads(line))
            return LogLine(str(record["process"]), str(record["level"]), str(record["message"]))
        except (ValueError, KeyError):
            pass  # This is not a line of the log.
    return LogLine("", "", line)


def as_json(process: str, line: str, *, level: str = "INFO") -> str:
    """Returns a line of a JSON log: the line itself if it is one, else an object with the line as its message."""
    if line.startswith("{") and parse(line).process:
        return line
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    record = {"time": now, "process": process, "pid": os.getpid(), "level": level, "message": line}
    return json.dumps(record)
