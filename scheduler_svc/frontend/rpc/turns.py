"""Owns the order in which new requests get the event loop: one per turn of the loop, so that running streams continue.

A request is checked, tokenized and hashed in about a millisecond, without a pause. If the handlers of many new requests
were ready in one turn of the loop, the tokens of every running stream would wait for all of them.
"""

import asyncio
from collections import deque


class Turns:
    """Lets one task pass per turn of the event loop, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        # Whether a task has passed in this turn.
        self._is_taken = False

    async def wait(self) -> None:
        """Returns at once, or in a later turn if another task passes in this one."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            # The caller of a cancelled task is gone.
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
