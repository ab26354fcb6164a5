"""Both clients under the face of the blocking one, for tests of what they have in common."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from tandem_client import AsyncClient, Client

# Makes a client of an address; its `with` block closes it.
Connect = Callable[..., AbstractContextManager[Any]]


class OfLoop:
    """An asynchronous client, stream or iterator as a blocking one: its loop runs in each call and each step alone."""

    def __init__(self, made: Any, runner: asyncio.Runner) -> None:
        vars(self).update(_made=made, _runner=runner)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._made, name)
        return (lambda *args, **options: self._run(value, *args, **options)) if callable(value) else value

    def __repr__(self) -> str:
        return repr(self._made)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._made, name, value)

    def close(self) -> None:
        """Waits for the end, as the blocking ones do."""
        self._run(getattr(self._made, "aclose", None) or self._made.close)

    def __iter__(self) -> "OfLoop":
        return self._run(aiter, self._made)

    def __next__(self) -> Any:
        try:
            return self._run(anext, self._made)
        except StopAsyncIteration:
            raise StopIteration from None

    def _run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        async def run() -> Any:
            made = call(*args, **options)
            return await made if inspect.isawaitable(made) else made

        made = self._runner.run(run())
        return OfLoop(made, self._runner) if hasattr(made, "__aiter__") else made


@contextmanager
def of_loop(address: str, **options: Any) -> Iterator[OfLoop]:
    """An asynchronous client with a loop of its own."""
    with asyncio.Runner() as runner:
        client = OfLoop(AsyncClient(address, **options), runner)
        try:
            yield client
        finally:
            client.close()


either = pytest.mark.parametrize("connect", [Client, of_loop], ids=["blocking", "of a loop"])
