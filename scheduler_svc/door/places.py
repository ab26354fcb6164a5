"""Parts of messages about the token file: the line of a setting, and a value that is safe to show. Knows no format."""

import re
from datetime import date, datetime, time

TOKEN_PREFIX = "tandem_"


def line_of(text: str, tenant: str, field: str) -> str:
    """Returns `line N` of a tenant's field, as well as the text shows it: of its table if the field is elsewhere."""
    header = re.compile(rf"\s*\[+\s*tenants\s*\.\s*[\"']?{re.escape(tenant)}[\"']?\s*[\].]")
    setting = re.compile(rf"\s*(\[\[.*\.\s*)?{field.partition('[')[0] or '$^'}\s*[=\]]")
    found, is_inside = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            is_inside = header.match(line) is not None
            found = found or (number if is_inside else 0)
        if is_inside and setting.match(line):
            return f"line {number}"
    return f"line {found or 1}"


def shown(value: object) -> str:
    """The value, cut short. Never a token that was pasted into the wrong place."""
    text = value.isoformat() if isinstance(value, datetime | date | time) else repr(value)
    if TOKEN_PREFIX in text:
        return "a token"
    return text if len(text) <= 40 else f"{text[:39]}…"
