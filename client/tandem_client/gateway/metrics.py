"""The gateway's own counters, as a Prometheus page.

Several processes share one port, so a scrape reaches any of them. Each counts in its own row of a shared table, and
every one shows the sums. A process that was started again in the place of another counts on in its row.
"""

import mmap
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

ENDPOINTS = ("models", "completions", "chat", "tokenize", "detokenize", "health", "other")
# `left`: the client went away first.
OUTCOMES = ("200", "400", "401", "403", "404", "405", "408", "409", "413", "429", "500", "503", "other", "left")
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_CELL_BYTES = 8
_REQUESTS = len(ENDPOINTS) * len(OUTCOMES)
# Cells after those of the requests, in this order: kind and help.
_SINGLE = {
    "requests_in_work": ("gauge", "Requests that have no complete answer yet."),
    "connections": ("gauge", "Open connections of clients."),
    "messages": ("counter", "Messages of the service that were passed on."),
    "prompt_tokens": ("counter", "Tokens of prompts with complete answers."),
    "output_tokens": ("counter", "Tokens of complete answers."),
    "connections_refused": ("counter", "Connections closed because there were too many."),
}
_CELLS = {name: _REQUESTS + i for i, name in enumerate(_SINGLE)}
_AFTER = _REQUESTS + len(_SINGLE)
# The histogram: its buckets, one above all bounds, and the sum.
NUM_CELLS = _AFTER + len(_BOUNDS) + 2
_TTFT = "tandem_gateway_time_to_first_token_seconds"


def table_bytes(num_processes: int) -> int:
    return NUM_CELLS * _CELL_BYTES * num_processes


class Meter:
    """One process's row, and the sums of all."""

    def __init__(self, path: Path | None = None, row: int = 0) -> None:
        """`path`: the file of the table; None makes one for this process alone."""
        if path is None:
            memory: mmap.mmap = mmap.mmap(-1, table_bytes(1))
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(memory).cast("d")
        self._start = row * NUM_CELLS
        for name, (kind, _) in _SINGLE.items():
            if kind == "gauge":
                # An earlier process in this place has none left.
                self._cells[self._start + _CELLS[name]] = 0.0

    def request(self, endpoint: str, outcome: str) -> None:
        column = OUTCOMES.index(outcome if outcome in OUTCOMES else "other")
        self._cells[self._start + ENDPOINTS.index(endpoint) * len(OUTCOMES) + column] += 1

    def add(self, name: str, number: float = 1) -> None:
        self._cells[self._start + _CELLS[name]] += number

    def first_token(self, seconds: float) -> None:
        """Counts the time from a request's arrival to its first token."""
        self._cells[self._start + _AFTER + bisect_left(_BOUNDS, seconds)] += 1
        self._cells[self._start + NUM_CELLS - 1] += seconds

    def page(self) -> bytes:
        return "".join(f"{line}\n" for line in self._lines()).encode()

    def _sum(self, cell: int) -> float:
        return sum(self._cells[cell::NUM_CELLS])

    def _lines(self) -> Iterator[str]:
        name = "tandem_gateway_requests_total"
        yield from _head(name, "counter", "Answered requests by endpoint and HTTP status.")
        for i, endpoint in enumerate(ENDPOINTS):
            for j, outcome in enumerate(OUTCOMES):
                if value := self._sum(i * len(OUTCOMES) + j):
                    yield f'{name}{{endpoint="{endpoint}",status="{outcome}"}} {value:.17g}'
        for short, (kind, words) in _SINGLE.items():
            name = f"tandem_gateway_{short}{'' if kind == 'gauge' else '_total'}"
            yield from _head(name, kind, words)
            yield f"{name} {self._sum(_CELLS[short]):.17g}"
        yield from _head(_TTFT, "histogram", "From the arrival of a streamed request to its first token.")
        total = 0.0
        for i, bound in enumerate((*map(str, _BOUNDS), "+Inf")):
            total += self._sum(_AFTER + i)
            yield f'{_TTFT}_bucket{{le="{bound}"}} {total:.17g}'
        yield f"{_TTFT}_sum {self._sum(NUM_CELLS - 1):.17g}"
        yield f"{_TTFT}_count {total:.17g}"


def _head(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"
