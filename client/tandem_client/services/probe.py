"""How `tandem serve` asks the scheduler that it has started. Imports gRPC: the programs start before that."""

from tandem_client.async_client import AsyncClient
from tandem_client.connection import Access


class Probe(AsyncClient):
    """A client of the scheduler that this process has started: it asks once, and never through a proxy."""

    def __init__(self, address: str) -> None:
        super().__init__(address, max_retries=0)
        self._access = Access(address=address, proxy=False)
