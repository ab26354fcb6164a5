"""A token bucket that holds one minute of a limit. It has no clock: callers pass the time."""


class Bucket:
    """It is full at the start. Its level may be negative after a request that is larger than the bucket."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` may be taken, 0 if now. A full bucket allows any amount."""
        missing = min(amount, self.per_minute) - self._level_at(now)
        return max(0.0, missing * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes the amount, also if it is not there."""
        self._level, self._at = self._level_at(now) - amount, now

    def give_back(self, amount: float, now: float) -> None:
        """Returns what was taken and not used."""
        self._level, self._at = min(float(self.per_minute), self._level_at(now) + amount), now

    def resized(self, per_minute: int, now: float) -> "Bucket":
        """Returns a bucket of another size from which as much is missing as from this one."""
        other = Bucket(per_minute, now)
        other.take(self.per_minute - self._level_at(now), now)
        return other

    def _level_at(self, now: float) -> float:
        return min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
