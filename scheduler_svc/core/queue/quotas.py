"""What each tenant uses: waiting requests, rows, requests and tokens per minute. `Accounts` has one `Account` a tenant.

The empty tenant (no token file) has no account and no limits. There are as many accounts as tenants had requests.

**Tokens per minute.** A request reserves its prompt and all output tokens that it may make when it is accepted, and
gets the unused ones back when it ends. A limit is therefore enforced only at the door: a stream never ends for it, and
a tenant cannot exceed it with many long requests at once. A request larger than the whole minute is accepted when the
bucket is full, and the tenant then waits until the debt is paid. A request with an unset maximum, which may make the
rest of a context, is accepted when its prompt and the expected output (`EXPECTED_TOKENS`) are free. It reserves its
prompt alone; each output token is charged when it comes.

**Queue.** One tenant must not shut others out, also if it has no `queue_share` or the shares add up to more than 1. So
if the token file has several tenants, a tenant may have 8 times as many places as are free (dynamic thresholds: one can
fill 8/9 of the queue), and an eighth of the queue is divided into places that tenants have even if it is full. The
queue may exceed its limits by that eighth. Front ends do not hear that the queue is full then, because it is not for
all tenants.

**Retry time.** A refusal for the queue says when the requests that wait will have left it, at the rate of the last 64
that did, from 0.5 to 60 s. If the tenant's part is full, its own requests and rate count.

**Rows.** A tenant at its `row_share` keeps its requests waiting even if rows are free. It is parked: left out of the
queue, so that it does not block others, until one of its rows is free.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.operators import TenantLimits
from tandem_contract.plural import numbered


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
        """Gives back what was taken and not used."""
        self._level, self._at = min(float(self.per_minute), self._level_at(now) + amount), now

    def resized(self, per_minute: int, now: float) -> "Bucket":
        """Returns a bucket of another size from which as much is missing as from this one."""
        other = Bucket(per_minute, now)
        other.take(self.per_minute - self._level_at(now), now)
        return other

    def _level_at(self, now: float) -> float:
        return min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)


_NO_LIMITS = TenantLimits()
FREE_FACTOR = 8
"""A tenant may have this many times as many places in the queue as are free."""
OWN_SHARE = 1 / 8
"""The part of the queue that is divided into places that each tenant has even if the queue is full."""


class Account:
    """One tenant's use and limits. `requests` and `tokens` are None without a limit."""

    def __init__(self, limits: TenantLimits, now: float, number: int) -> None:
        self.number = number
        """From 1 on."""
        self.waiting = 0
        self.waiting_tokens = 0
        self.drain = DrainRate()
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.change(limits, now)

    def change(self, limits: TenantLimits, now: float) -> None:
        """Replaces the limits. What was taken from the minute before stays taken."""
        self.limits = limits
        self.requests = _changed(self.requests, limits.requests_per_minute, now)
        self.tokens = _changed(self.tokens, limits.tokens_per_minute, now)

    def queues(self, count: int, tokens: int) -> None:
        """Counts waiting requests and their tokens; both numbers are negative for requests that no longer wait."""
        self.waiting += count
        self.waiting_tokens += tokens

    def charge(self, tokens: int, now: float, *, requests: int = 1) -> None:
        """Takes accepted requests and tokens that they may need or have made."""
        if self.requests is not None:
            self.requests.take(requests, now)
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def give_back(self, tokens: int, now: float) -> None:
        """Gives back the tokens of an ended request that were not made."""
        if self.tokens is not None:
            self.tokens.give_back(tokens, now)

    def rate_refusal(self, tokens: int, now: float, *, is_expected: bool = False) -> tuple[str, float] | None:
        """Returns one sentence and the seconds until the request would be accepted, or None if it is accepted.

        It needs up to `tokens`, or is expected to.
        """
        for bucket, amount, unit in ((self.requests, 1, "requests"), (self.tokens, tokens, "tokens")):
            if bucket is not None and (seconds := bucket.wait(amount, now)) > 0:
                limit = f"the limit of this tenant is {bucket.per_minute} {unit} per minute ({unit}_per_minute)"
                some = "an expected" if is_expected else "up to"
                needs = "" if bucket is self.requests else f" of {some} {numbered(tokens, 'token')}"
                return f"a request{needs} is accepted in {seconds:.3f} s; {limit}", seconds
        return None

    def queue_refusal(self, count: int, tokens: int, max_waiting: int, max_waiting_tokens: int) -> str:
        """Returns one sentence if the tenant's share of the queue has no room for the request, otherwise ''."""
        share = self.limits.queue_share
        if share is None:
            return ""
        # One request always fits an empty share: a small one must not exclude its tenant.
        most, most_tokens = max(1, int(share * max_waiting)), int(share * max_waiting_tokens)
        if self.waiting and self.waiting + count > most:
            return (
                f"{numbered(self.waiting, 'request of this tenant', 'are')} waiting; "
                f"its limit is {most} (queue_share {share:g})"
            )
        if self.waiting and self.waiting_tokens + tokens > most_tokens:
            return (
                f"{numbered(self.waiting_tokens, 'token of this tenant', 'are')} waiting "
                f"and the request has {tokens}; its limit is "
                f"{most_tokens} (queue_share {share:g})"
            )
        return ""

    def crowds_others(self, count: int, tokens: int, free: int, free_tokens: int) -> str:
        """Returns one sentence if the request would leave too little of the queue to other tenants, otherwise ''.

        Dynamic thresholds (Choudhury and Hahne, 1998): one tenant can fill 8/9 of the queue, two 8/17 each, so some of
        it is always free for others.
        """
        limit = f"a tenant may have {FREE_FACTOR} times what is free, so that others find room"
        if self.waiting + count > FREE_FACTOR * free:
            return (
                f"{numbered(self.waiting, 'request of this tenant', 'are')} waiting and "
                f"{numbered(free, 'place', 'are')} free; {limit}"
            )
        if self.waiting_tokens + tokens > FREE_FACTOR * free_tokens:
            return (
                f"{numbered(self.waiting_tokens, 'token of this tenant', 'are')} waiting and "
                f"{free_tokens} are free; {limit}"
            )
        return ""


def _changed(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    return bucket if bucket.per_minute == per_minute else bucket.resized(per_minute, now)


class Accounts:
    """Accounts by the tenant's name."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Account] = {}
        # In the order of their numbers.
        self._all: list[Account] = []
        self._limits: Mapping[str, TenantLimits] = {}

    @property
    def is_shared(self) -> bool:
        """Whether the token file has several tenants."""
        return len(self._limits) > 1

    def has_own_place(self, tenant: str, count: int, tokens: int, max_waiting: int, max_waiting_tokens: int) -> bool:
        """Returns whether a request fits the tenant's own places, where other tenants cannot keep it out.

        One request always fits. The queue may exceed its limits by `OWN_SHARE`, or one request of each tenant.
        """
        if not tenant or not self.is_shared:
            return False
        account, share = self.of(tenant), OWN_SHARE / len(self._limits)
        if account.waiting + count > share * max_waiting:
            return not account.waiting
        return not account.waiting or account.waiting_tokens + tokens <= share * max_waiting_tokens

    def items(self) -> Iterable[tuple[str, Account]]:
        """Returns the accounts of all tenants that had requests."""
        return self._by_tenant.items()

    def change(self, limits: Mapping[str, TenantLimits], now: float) -> None:
        """Takes the limits of the token file. A tenant that left the file keeps none."""
        self._limits = limits
        for tenant, account in self._by_tenant.items():
            account.change(limits.get(tenant, _NO_LIMITS), now)

    def of(self, tenant: str, now: float = 0.0) -> Account:
        """Returns the account of a tenant with a name. One that had no request has full buckets, and is not kept."""
        return self._by_tenant.get(tenant) or Account(self._limits.get(tenant, _NO_LIMITS), now, len(self._all) + 1)

    def open(self, tenant: str, now: float) -> Account:
        """Keeps the account of a tenant with a name from its first request on. Returns it."""
        account = self.of(tenant, now)
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = account
            self._all.append(account)
        return account

    def made(self, numbers: Int32Array, now: float) -> None:
        """Charges output tokens that have come: one for each entry, which is an account's number, or 0 for none."""
        counts = np.bincount(numbers)
        for number in np.flatnonzero(counts).tolist():
            if number:
                self._all[number - 1].charge(int(counts[number]), now, requests=0)


_RECENT = 64
LEAST_SECONDS, MOST_SECONDS = 0.5, 60.0
"""Bounds of an estimate. The least one is also the answer before anything was measured."""


class DrainRate:
    """The last requests that got their first row: their times and prompt tokens."""

    def __init__(self) -> None:
        self._started: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._tokens = 0
        self.num_started = 0

    def record(self, now: float, tokens: int) -> None:
        """Counts a request that left the queue."""
        self.num_started += 1
        if len(self._started) == _RECENT:
            self._tokens -= self._started[0][1]
        self._started.append((now, tokens))
        self._tokens += tokens

    def seconds(self, requests: int, tokens: int, now: float) -> float:
        """Returns in how many seconds that many requests and tokens will have left the queue, within the bounds."""
        if not self._started:
            return LEAST_SECONDS
        elapsed = now - self._started[0][0]
        estimate = max(requests / len(self._started), tokens / max(1, self._tokens)) * elapsed
        return min(max(estimate, LEAST_SECONDS), MOST_SECONDS)
