"""Reads the W3C trace context of a call (Trace Context, level 1): the `traceparent` of its metadata.

Owns the check. As the standard says, a malformed traceparent is ignored: the call goes on as if it had none.
`tracestate` is not read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

KEY = "traceparent"
# Later versions may append fields, of which nothing is read.
_MAX_CHARS = 256
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Traceparent:
    """A valid traceparent: 32 and 16 hexadecimal digits, none of them all zeros, and a bit."""

    trace_id: str
    parent_id: str
    is_sampled: bool

    def __str__(self) -> str:
        """As version 00, which is what a service that knows no later version passes on."""
        return f"00-{self.trace_id}-{self.parent_id}-{int(self.is_sampled):02x}"


def find(metadata: Iterable[tuple[str, str | bytes]]) -> Traceparent | None:
    """Returns the traceparent of a call's metadata. None if there is none, more than one, or a malformed one."""
    values = [value for key, value in metadata if key == KEY]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    return parse(values[0])


def parse(value: str) -> Traceparent | None:
    """Returns the traceparent in a header's value, None if it is malformed."""
    found = None if len(value) > _MAX_CHARS else _FORM.fullmatch(value)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return Traceparent(trace_id, parent_id, bool(int(flags, 16) & _SAMPLED))
