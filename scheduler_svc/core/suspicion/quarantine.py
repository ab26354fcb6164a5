"""The quarantine: requests that are refused because they killed their workers or made their steps fail.

An entry expires after `seconds`; if there are `MAX_ENTRIES`, a new one replaces the oldest.
"""

from collections.abc import Collection
from dataclasses import replace
from hashlib import sha256
from math import inf

from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.operators import QuarantineEntry
from scheduler_svc.core.state.request import Request

MAX_ENTRIES = 1024


class Quarantine:
    """Entries by key, oldest first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Each with the time of its conviction, on the core's clock.
        self._entries: dict[str, tuple[float, QuarantineEntry]] = {}
        self.revision = 0
        """Number of changes other than expiries."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, cause: str, now: float) -> None:
        submit = request.submit
        tenant = sha256(b"tenant" + submit.prefix_root).hexdigest()[:16]
        names = {"key": key_of(submit), "request_id": submit.request_id, "tenant": tenant}
        self.restore(QuarantineEntry(**names, age_seconds=0.0, expires_seconds=self._seconds, cause=cause), now)

    def restore(self, entry: QuarantineEntry, now: float) -> None:
        """Adds an entry of this age; entries are added in the order of their times."""
        self.revision += 1
        self._entries.pop(entry.key, None)
        self._entries[entry.key] = now - entry.age_seconds, entry
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]

    def _lasts(self, at: float, now: float) -> bool:
        return at + self._seconds > now

    def report(self, now: float) -> tuple[QuarantineEntry, ...]:
        """Returns all entries that have not expired, oldest first."""
        return tuple(
            replace(entry, age_seconds=now - at, expires_seconds=at + self._seconds - now)
            for at, entry in self._entries.values()
            if self._lasts(at, now)
        )

    def clear(self, keys: Collection[str], now: float) -> int:
        """Removes the entries with these keys, all of them without keys. Returns how many were removed."""
        self.revision += 1
        lasting = {key: one for key, one in self._entries.items() if self._lasts(one[0], now)}
        self._entries = {key: one for key, one in lasting.items() if keys and key not in keys}
        return len(lasting) - len(self._entries)

    def refusal(self, submit: Submit, now: float) -> str:
        """Returns one sentence if the request is quarantined, otherwise an empty string."""
        # The newest entry expires last. Without one the key, for which all tokens are read, is not made.
        if not self._entries or not self._lasts(next(reversed(self._entries.values()))[0], now):
            return ""
        at, entry = self._entries.get(key_of(submit), (-inf, None))
        if entry is None or not self._lasts(at, now):
            return ""
        left = at + self._seconds - now
        return (
            f"this request is quarantined for another {left:.0f} s: when it ran as {entry.request_id!r} "
            f"{now - at:.0f} s ago, {entry.cause}"
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
