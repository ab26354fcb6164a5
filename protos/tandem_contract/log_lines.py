"""The lines of a log: text, or one JSON object each. Makes them, and reads them among the output of libraries."""

import datetime
import json
import logging
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

LogFormat = Literal["text", "json"]
# Most characters of one message, because a peer may have chosen some of them.
_MAX_MESSAGE = 4096
# Control characters, line separators, marks that change the direction of text, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# The values of fields that a text line shows without quotation marks.
_PLAIN = re.compile(r"[\w.:/@+,-]+", re.ASCII)
# Lines without a cause: empty ones, tracebacks, and the stacks that Python writes at a fatal signal, after its name.
_OF_STACKS = re.compile(r"\s*$|  |(Thread|Current thread) 0x|Extension modules: ")
# 2026-11-22 02:12:58.026 core INFO message
_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?P<process>\S.*?) (?P<level>[A-Z]+) (?P<message>.*)")


def escaped(text: str) -> str:
    """Returns the text with control characters escaped: it is one line then and cannot control a terminal."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class Formatter(logging.Formatter):
    """`2026-11-22 02:12:58.026 core INFO message`, or one JSON object per record."""

    def __init__(self, process: str, log_format: LogFormat) -> None:
        super().__init__()
        self._process = process
        self.is_json = log_format == "json"
        # The last second, as a Unix time and as text, and the offset of local time: what each line needs costs much.
        self._second = (0, "", "")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's line without its newline. A traceback is indented below it, or is `error` in JSON."""
        message = escaped(record.getMessage())
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}… ({len(message) - _MAX_MESSAGE:,} characters more)"
        error = self._traceback(record)
        second, millisecond = divmod(int(record.created * 1000), 1000)
        if second != self._second[0]:
            self._second = (second, *_texts(second))
        _, time, zone = self._second
        if self.is_json:
            fields: dict[str, object] = {
                "time": f"{time.replace(' ', 'T')}.{millisecond:03d}{zone}",
                "process": self._process,
                "pid": record.process,
                "level": record.levelname,
                "message": message,
            }
            fields |= record.__dict__.get("fields", {})
            return json.dumps(fields | {"error": error} if error else fields)
        named = "".join(f" {name}={_shown(value)}" for name, value in record.__dict__.get("fields", {}).items())
        line = f"{time}.{millisecond:03d} {self._process} {record.levelname} {message}{named}"
        return f"{line}\n{textwrap.indent(error, '    ')}" if error else line

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[0] is None:
            return ""
        return "\n".join(map(escaped, self.formatException(record.exc_info).split("\n")))


def _texts(second: int) -> tuple[str, str]:
    """Local time of a Unix time, and the offset of local time then: `2026-11-22 02:12:58` and `+01:00`."""
    at = datetime.datetime.fromtimestamp(second).astimezone().isoformat(" ")
    return at[:19], at[19:]


def _shown(value: object) -> str:
    """A value as a text line shows it. Quoted strings have only ASCII characters, so nothing in them ends a line."""
    text = str(value)
    if not isinstance(value, str):
        return text
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


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


def may_have_cause(line: str) -> bool:
    """Whether a line of a program's output may tell why it ended; those of stacks do not."""
    return not _OF_STACKS.match(line)


def last_line(lines: Iterable[str]) -> str:
    """Returns the message of the last line of a program's output that may have the cause of its end."""
    causes = list(filter(may_have_cause, lines))
    return parse(causes[-1]).message.strip() if causes else "it printed nothing"


def as_json(process: str, line: str, *, level: str = "INFO") -> str:
    """Returns a line of a JSON log: the line itself if it is one, else an object with the line as its message."""
    if line.startswith("{") and parse(line).process:
        return line
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    record = {"time": now, "process": process, "pid": os.getpid(), "level": level, "message": line}
    return json.dumps(record)
