"""Abort over several cells, for blocking code."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from tandem.v1 import control_pb2

from tandem_client.cells import calls
from tandem_client.cells.router import Router


class Abort:
    """Abort at the cells that have the requests, and at all for those of which nobody knows."""

    def __init__(self, router: Router, inner: Sequence[Any]) -> None:
        self._router, self._inner = router, inner

    def __call__(
        self, request: control_pb2.AbortRequest, timeout: float | None = None, metadata: Any = None
    ) -> control_pb2.AbortResponse:
        return self.future(request, timeout=timeout, metadata=metadata).result()

    def future(
        self, request: control_pb2.AbortRequest, timeout: float | None = None, metadata: Any = None
    ) -> "_Aborting":
        """Sends the Aborts without waiting."""
        parts = calls.split_abort(request, self._router, len(self._inner))
        futures = [
            self._inner[number].future(control_pb2.AbortRequest(request_ids=ids), timeout=timeout, metadata=metadata)
            for number, ids in parts.items()
        ]
        return _Aborting(request, futures)


class _Aborting:
    """The Aborts under way."""

    def __init__(self, request: control_pb2.AbortRequest, futures: Sequence[Any]) -> None:
        self._request, self._futures = request, futures
        self._left, self._lock = len(futures), threading.Lock()

    def result(self, timeout: float | None = None) -> control_pb2.AbortResponse:
        """Waits for all cells. Raises if one that did not answer may have a request."""
        answers, failed = results(self._futures, timeout)
        merged = calls.merged_abort(self._request, answers)
        if failed and not calls.are_all_aborted(self._request, merged):
            raise failed[0]
        return merged

    def add_done_callback(self, callback: Callable[[object], object]) -> None:
        """Calls once all are done."""

        def one_done(_: object) -> None:
            with self._lock:
                self._left -= 1
                left = self._left
            if left == 0:
                callback(self)

        for future in self._futures:
            future.add_done_callback(one_done)


def results(futures: Iterable[Any], timeout: float | None = None) -> tuple[list[Any], list[grpc.RpcError]]:
    """The answers of several calls under way, and the errors."""
    answers: list[Any] = []
    failed: list[grpc.RpcError] = []
    for future in futures:
        try:
            answers.append(future.result(timeout=timeout))
        except grpc.RpcError as error:
            failed.append(error)
    return answers, failed
