"""Owns the versions of libraries that chats need. They are an extra, so a service may run without them."""

import re
from importlib import metadata

EXTRA = "pip install 'tandem-inference[chat]'"
# Transformers has sanitize_control_tokens from this version on; older versions of jinja2 have holes in the sandbox.
LEAST = {"transformers": (5, 23), "jinja2": (3, 1, 6)}


def refusal() -> str:
    """Why chats cannot be served here, in one sentence; empty if they can. Imports neither library."""
    for name, least in LEAST.items():
        needed = ".".join(map(str, least))
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"chats need {name} {needed} or newer on the scheduler's machine, and it is not installed: {EXTRA}"
        if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < least:
            return f"chats need {name} {needed} or newer on the scheduler's machine, and {found} is installed: {EXTRA}"
    return ""
