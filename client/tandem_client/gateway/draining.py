"""The end of a gateway in order: new requests are refused, and those in work go on.

Owns whether the gateway drains, and how many requests are in work. A refused caller is told when to come again, and its
connection ends. Knows nothing of signals.
"""

import asyncio
import json
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_client.gateway.errors import unavailable
from tandem_client.gateway.exchange import Answer, refusal
from tandem_client.gateway.service import SHUTTING_DOWN

_HEALTH = "/health"
# They say nothing of requests.
_ALWAYS = frozenset(("/livez", "/metrics", "/version", "/openapi.json"))
_RETRY_SECONDS = 1.0
_CLOSE = {"connection": "close"}


class Drain:
    """Whether one process of the gateway drains."""

    def __init__(self) -> None:
        self.num_in_work = 0
        # Unix time of its begin; 0 before.
        self.since = 0.0
        # Set when the last request in work has ended.
        self.changed = asyncio.Event()

    def begin(self) -> None:
        """Refuses requests from now on."""
        self.since = time.time()


class Draining:
    """Lets requests pass, or refuses them."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._drain.since and scope["path"] not in _ALWAYS:
            await self._refusal(Request(scope))(scope, receive, send)
            return
        self._drain.num_in_work += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.num_in_work -= 1
            if not self._drain.num_in_work:
                self._drain.changed.set()

    def _refusal(self, request: Request) -> Response:
        error = unavailable("the gateway is draining: it takes no new requests", seconds=_RETRY_SECONDS)
        error.headers = {**error.headers, **_CLOSE}
        if request.scope["path"] != _HEALTH:
            return refusal(request, error)
        why = {"status": "not serving", "reason": SHUTTING_DOWN, "since": self._drain.since}
        return Answer(json.dumps(why), error.status, error.headers)
