"""The quarantine: requests that are refused because they killed their workers or made their steps fail.

An entry holds hashes, an id and a sentence, and neither text nor tokens. It expires after `seconds`; if there are
`MAX_ENTRIES`, a new one replaces the oldest.
"""

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256

from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.operators import QuarantineEntry
from scheduler_svc.core.state.request import Request

MAX_ENTRIES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One quarantined request. The fields are as in `QuarantineEntry`; `at` is its conviction by the core's clock."""

    key: str
    request_id: str
    tenant: str
    at: float
    cause: str


class Quarantine:
    """Entries by key, oldest first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: dict[str, Entry] = {}
        self.revision = 0
        """Number of changes other than expiries."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, cause: str, now: float) -> Entry:
        """Quarantines a convicted request."""
        submit = request.submit
        key = key_of(submit)
        entry = Entry(key=key, request_id=submit.request_id, tenant=_tenant(submit.prefix_root), at=now, cause=cause)
        self.restore(entry)
        return entry

    def restore(self, entry: Entry) -> None:
        """Adds an entry; entries are added in the order of their times."""
        self.revision += 1
        self._entries.pop(entry.key, None)
        self._entries[entry.key] = entry
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]

    def entries(self, now: float) -> list[Entry]:
        """Returns all entries that have not expired, oldest first."""
        return [entry for entry in self._entries.values() if self._lasts(entry, now)]

    def _lasts(self, entry: Entry, now: float) -> bool:
        return entry.at + self._seconds > now

    def report(self, now: float) -> tuple[QuarantineEntry, ...]:
        """Returns the entries for an operator, oldest first."""
        return tuple(
            QuarantineEntry(
                key=entry.key,
                request_id=entry.request_id,
                tenant=entry.tenant,
                age_seconds=now - entry.at,
                expires_seconds=entry.at + self._seconds - now,
                cause=entry.cause,
            )
            for entry in self.entries(now)
        )

    def clear(self, keys: Collection[str], now: float) -> int:
        """Removes the entries with these keys, all of them without keys. Returns how many were removed."""
        self.revision += 1
        entries = self.entries(now)
        self._entries = {entry.key: entry for entry in entries if keys and entry.key not in keys}
        return len(entries) - len(self._entries)

    def refusal(self, submit: Submit, now: float) -> str:
        """Returns one sentence if the request is quarantined, otherwise an empty string."""
        # The newest entry expires last. Without one the key, for which all tokens are read, is not made.
        if not self._entries or not self._lasts(next(reversed(self._entries.values())), now):
            return ""
        entry = self._entries.get(key_of(submit))
        if entry is None or not self._lasts(entry, now):
            return ""
        left = entry.at + self._seconds - now
        return (
            f"this request is quarantined for another {left:.0f} s: when it ran as {entry.request_id!r} "
            f"{now - entry.at:.0f} s ago, {entry.cause}"
        )


def key_of(submit: Submit) -> str:
    """Returns the key of a request, the same each time that it is submitted.

    Each part is hashed with its length, so no two requests give the same bytes.
    """
    sampling, stops, limits = submit.options
    parts = [submit.prefix_root, submit.prompt.tobytes(), sampling, repr((sorted(set(stops)), *limits)).encode()]
    if submit.tenant:
        parts.append(submit.tenant.encode())
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _tenant(prefix_root: bytes) -> str:
    return sha256(b"tenant" + prefix_root).hexdigest()[:16]
