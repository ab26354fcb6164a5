"""Fair sharing of the service between tenants: start-time fair queueing, counted in tokens.

Each request gets a virtual start time, which determines its place in the queue (`order.queue_key`). The virtual
time of the service is the largest start time of the requests admitted so far. A new request starts where its tenant's
previous request finishes, but not before the virtual time of the service:

    start  = max(virtual time, finish of the tenant's previous request)
    finish = start + cost                        cost: largest number of tokens, prompt and output

The requests of a tenant with many requests therefore wait for each other, and a tenant gets no credit for idle time.
With a single tenant the order is first come, first served.

Sources: Goyal, Vin and Cheng, "Start-time fair queueing" (1996). Counting a request's cost in tokens follows Sheng et
al., "Fairness in serving large language models" (2024).
"""


class FairShare:
    """The virtual time of the service and the last finish time of each tenant.

    A tenant is identified by its name in the token file. Without a token file, each `prefix_root` counts as a tenant.
    """

    def __init__(self) -> None:
        self._virtual_time = 0
        self._last_finish: dict[str | bytes, int] = {}

    def enter(self, tenant: str | bytes, cost: int) -> int:
        """Returns the virtual start time of a new request that costs at most `cost` tokens."""
        start = max(self._virtual_time, self._last_finish.get(tenant, 0))
        self._last_finish[tenant] = start + cost
        return start

    def admitted(self, virtual_start: int) -> None:
        """Advances the virtual time to the start time of an admitted request."""
        self._virtual_time = max(self._virtual_time, virtual_start)

    def prune(self, num_live: int) -> None:
        """Drops tenants to bound the memory to about two per live request.

        A tenant with a finish time in the past is equal to a new tenant, so dropping it changes nothing. If too many
        finish times are in the future (for example, because each request has a different salt), the virtual time
        advances until only a few are, and the dropped tenants are treated as new.
        """
        if len(self._last_finish) > 2 * num_live + 64:
            finishes = sorted(self._last_finish.values(), reverse=True)
            self._virtual_time = max(self._virtual_time, finishes[num_live + 32])
            self._last_finish = {
                tenant: finish for tenant, finish in self._last_finish.items() if finish > self._virtual_time
            }
