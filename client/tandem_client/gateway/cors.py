"""Answers for web pages of other sites, which a browser shows them only with the headers of CORS.

Owns which requests of pages are answered: Starlette's middleware, with answers to preflights that are counted and
bounded as all others are. A preflight comes without a token and asks for nothing of the service.
"""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.exchange import Answer, too_large
from tandem_client.gateway.settings import ANY_ORIGIN


def early_headers(origins: Collection[str], origin: str) -> dict[str, str]:
    """Returns the headers for an answer to a head that is not complete.

    If its `origin` has not come and is empty, only pages of every site (`*`) can read the answer.
    """
    if not origins:
        return {}
    allowed = ANY_ORIGIN if ANY_ORIGIN in origins else origin if origin in origins else ""
    read = {"access-control-allow-origin": allowed, "access-control-expose-headers": "*"} if allowed else {}
    return {**read, "vary": "Origin"}


class Cors(CORSMiddleware):
    """Adds the headers to every answer for a page that may call, and answers preflights."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        # A token is a header that a page sets itself, and no cookie: credentials of the browser are not wanted.
        super().__init__(
            app, allow_origins=origins, allow_methods=("GET", "HEAD", "POST"), allow_headers=("*",),
            expose_headers=("*",), allow_private_network=True,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a preflight; passes on all else, and a preflight that is to be refused for its size."""
        if too_large(scope) is None:
            await super().__call__(scope, receive, send)
        else:
            await self.simple_response(scope, receive, send, request_headers=Headers(scope=scope))

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight; one that is refused says why, which browsers show in the list of requests."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return Answer(answer.body, headers=answer.headers)
        said = f"{bytes(answer.body).decode()}; --cors-origins of the gateway has the origins of pages that may call"
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return Answer(HttpError(400, said).body(), 400, kept)
