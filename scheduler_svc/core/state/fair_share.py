"""Who stands where in the queue: tags of start-time fair queueing, in tokens of service.

Owns the tenants' last tags and how far the service has come. Method: Goyal, Vin and Cheng, "Start-time fair queueing"
(1996), with a request's tokens as its cost, as Sheng et al. count them in "Fairness in serving large language models"
(2024). A request's tag is where its tenant stood when it came, or where the service stands, whichever is further; its
cost moves the tenant on. Where one tenant is alone, that is first come, first served.
"""


class FairShare:
    """A tenant is a request's `prefix_root`; nothing else is known of it."""

    def __init__(self) -> None:
        self._served = 0
        self._next_starts: dict[bytes, int] = {}

    def enter(self, tenant: bytes, cost: int) -> int:
        """The tag of a new request of so many tokens, prompt and what it may say."""
        tag = max(self._served, self._next_starts.get(tenant, 0))
        self._next_starts[tenant] = tag + cost
        return tag

    def admitted(self, tag: int) -> None:
        """A request with this tag is being served."""
        self._served = max(self._served, tag)

    def prune(self, num_live: int) -> None:
        """Forgets tenants who are no further than the service: they are as good as new.

        Where too many are further (each may have come once, with a salt of its own), the service is moved on to where
        few are: what those behind it were ahead is forgiven.
        """
        if len(self._next_starts) > 2 * num_live + 64:
            self._served = max(self._served, sorted(self._next_starts.values(), reverse=True)[num_live + 32])
            self._next_starts = {tenant: tag for tenant, tag in self._next_starts.items() if tag > self._served}
