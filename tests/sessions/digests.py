"""The committed digests of the sessions, by kind, in the order of its seeds, and the record's version that they are of.

Owns their file.
"""

import json
from pathlib import Path

from scheduler_svc.recording.event_log import VERSION

DIGESTS = Path(__file__).with_name("digests.json")


def read(path: Path) -> dict[str, list[str]]:
    """Raises ValueError if the digests are of another version of the record."""
    version, digests = json.loads(path.read_text()).values()
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, and the record has {VERSION}: make sessions-update")
    return digests


def write(path: Path, digests: dict[str, list[str]]) -> None:
    """Replaces the file."""
    path.write_text(json.dumps({"version": VERSION, "digests": digests}, indent=1) + "\n")
