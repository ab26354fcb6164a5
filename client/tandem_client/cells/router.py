"""Which cell a request goes to, from what a client knows: the affinity of requests, loads, and cells that failed.

Owns the choice and the memory of which cell has which request. Does no I/O, and takes the time as an argument. Threads
may share it.

The cells are ordered by rendezvous hashing (Thaler and Ravishankar 1998), so that a cell that comes or goes moves only
its own requests. The first cell of that order that is not overloaded is chosen, as in consistent hashing with bounded
loads (Mirrokni, Thorup, Zadimoghaddam 2016): a cell may have 1.25 times its share of all requests.
"""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

# A load is looked up again after so many seconds; a cell that failed is avoided for as long.
LOOK_SECONDS = 1.0
LOAD_FACTOR = 1.25
# A cell with fewer requests per worker than this is not overloaded, whatever the others have.
_FEW_PER_WORKER = 8
MAX_REMEMBERED = 65_536


@dataclass(slots=True)
class _Cell:
    address: str
    # Requests of this client that have not ended.
    own: int = 0
    # The last report: requests of all callers, workers, and how many of the requests were this client's own.
    reported: int = 0
    workers: int = 1
    own_then: int = 0
    avoid_until: float = -math.inf

    @property
    def load(self) -> int:
        """The requests that it has, by the last report and what this client has begun and ended since."""
        return max(self.own, self.reported + self.own - self.own_then)


class Router:
    """The cells of one client, by number."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._cells = [_Cell(address) for address in addresses]
        self._cell_of: OrderedDict[str, int] = OrderedDict()
        self._looked_at = -math.inf
        self._lock = threading.Lock()

    def order(self, key: str) -> list[int]:
        """The cells by preference for requests of this affinity."""

        def weight(number: int) -> bytes:
            return hashlib.blake2b(f"{key} {self._cells[number].address}".encode(), digest_size=8).digest()

        return sorted(range(len(self._cells)), key=weight, reverse=True)

    def choose(self, key: str, request_id: str, now: float, tried: Container[int] = ()) -> int | None:
        """The cell for a request, which it counts until `ended`; None if all were tried."""
        with self._lock:
            left = [number for number in self.order(key) if number not in tried]
            if not left:
                return None
            usable = [number for number in left if self._cells[number].avoid_until <= now] or left
            chosen = next((number for number in usable if self._has_room(number)), None)
            if chosen is None:
                chosen = min(usable, key=lambda number: self._cells[number].load / self._cells[number].workers)
            self._cells[chosen].own += 1
            self._remember(request_id, chosen)
            return chosen

    def _has_room(self, number: int) -> bool:
        cell = self._cells[number]
        # Those to which a request could go; a cell without workers has no share.
        total = sum(cell.load for cell in self._cells)
        workers = max(1, sum(cell.workers for cell in self._cells))
        share = math.ceil(LOAD_FACTOR * (total + 1) * cell.workers / workers)
        return cell.load < max(share, _FEW_PER_WORKER * cell.workers)

    def ended(self, number: int) -> None:
        """A request that was sent to the cell has ended there, or was not accepted."""
        with self._lock:
            self._cells[number].own -= 1

    def failed(self, number: int, now: float) -> None:
        """The cell did not answer, or does not serve."""
        with self._lock:
            self._cells[number].avoid_until = now + LOOK_SECONDS

    def is_look_due(self, now: float) -> bool:
        """Whether to ask the cells for their load; True at most once per LOOK_SECONDS."""
        with self._lock:
            due = now - self._looked_at >= LOOK_SECONDS
            if due:
                self._looked_at = now
            return due

    def reported(self, number: int, requests: int, workers: int, now: float) -> None:
        """A cell answered with its running and waiting requests, and the number of its workers."""
        with self._lock:
            cell = self._cells[number]
            cell.reported, cell.workers, cell.own_then = requests, max(1, workers), cell.own
            cell.avoid_until = -math.inf if workers else now + 2 * LOOK_SECONDS

    def cell_of(self, request_id: str) -> int | None:
        """The cell to which the request was last sent; None if that is not known."""
        with self._lock:
            return self._cell_of.get(request_id)

    def remember(self, request_id: str, number: int) -> None:
        """The cell has the request."""
        with self._lock:
            self._remember(request_id, number)

    def _remember(self, request_id: str, number: int) -> None:
        self._cell_of[request_id] = number
        self._cell_of.move_to_end(request_id)
        if len(self._cell_of) > MAX_REMEMBERED:
            self._cell_of.popitem(last=False)
