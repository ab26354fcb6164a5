"""The lines that the gateway writes to stderr: text, or one JSON object each."""

import json
import logging
import time


class Lines(logging.Formatter):
    """`2026-11-22 02:12:58.026 gateway INFO message`, as the service's other programs."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line without its newline."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        at = f"{at}.{int(record.msecs):03d}"
        # A caller may have chosen a part of it.
        message = record.getMessage().encode("unicode_escape").decode("ascii")
        error = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            fields: dict[str, object] = {
                "time": at.replace(" ", "T"), "process": "gateway", "pid": record.process, "level": record.levelname,
                "message": message,
            }  # fmt: skip
            return json.dumps(fields | {"error": error} if error else fields)
        line = f"{at} gateway {record.levelname} {message}"
        return f"{line}\n{error}" if error else line


def start(level: str, *, as_json: bool) -> None:
    """Sends all records of this process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines(as_json=as_json))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It reports what clients do wrong, and its own start and end.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
