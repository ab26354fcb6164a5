"""The lines that the services print: their log, as text or JSON, and the output of libraries.

Owns the log's format as it is read here.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, cast

# 2026-11-22 02:12:58.026 core INFO message
_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?P<process>\S+) (?P<level>[A-Z]+) (?P<message>.*)")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `process` and `level` are empty where it is not of the log."""

    process: str
    level: str
    message: str


def parse(line: str) -> LogLine:
    """The parts of a line in either format; a line of neither is all message."""
    found = _TEXT.fullmatch(line)
    if found is not None:
        return LogLine(found["process"], found["level"], found["message"])
    if line.startswith("{"):
        try:
            record = cast(dict[str, Any], json.loads(line))
            return LogLine(str(record["process"]), str(record["level"]), str(record["message"]))
        except (ValueError, KeyError):
            pass  # Not of the log.
    return LogLine("", "", line)
