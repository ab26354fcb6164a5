"""The clock of a journal's stamps: Unix time that follows no later jump of the system's clock.

Nobody's request ends early because the system's time was corrected by hours. Only a restart of the machine, over which
no other clock goes on, takes the system's time again.
"""

import time
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalClock:
    """`booted_at` is the Unix time of the start of the machine, which has the kernel's `boot_id`; empty: unknown."""

    boot_id: str
    booted_at: float

    def now(self) -> float:
        """Returns the time."""
        return self.booted_at + _since_boot()

    def written_at(self, unix_time: float) -> float:
        """Returns when a file was written that has this time of the system's clock, which is not in the future."""
        return self.now() - max(0.0, time.time() - unix_time)


def clock_after(boot_id: str, booted_at: float) -> JournalClock:
    """Returns the clock that goes on with that of an earlier process, if the machine has not been started since."""
    present = _boot_id()
    if not present or boot_id != present:
        booted_at = time.time() - _since_boot()
    return JournalClock(boot_id=present, booted_at=booted_at)


def _since_boot() -> float:
    """Seconds since the start of the machine, those in which it was suspended included."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
