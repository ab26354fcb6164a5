"""The application by itself: mistakes of its own, and paths that are none."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from tandem_client.gateway.accepting import SEAT, Seats
from tandem_client.gateway.app import App
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.settings import Settings

Ask = Callable[..., httpx.Response]
ORIGIN = {"origin": "https://example.org", "access-control-request-method": "POST"}


class Mistaken:
    """A service whose every answer is a mistake."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("something private")


class Open:
    """A guard of a service without tokens."""

    needs_tokens = False

    def check(self) -> None: ...


@pytest.fixture
def ask() -> Ask:
    """Sends a request to an application, without a socket."""
    seats = Seats(Meter(), max_connections=1)
    seat, service, guard = seats.take("a"), Mistaken(), Open()
    app = App(Settings(), service, Meter(), guard, seats)  # pyright: ignore[reportArgumentType]

    async def seated(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {SEAT: seat}
        await app(scope, receive, send)

    async def send(method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(seated, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.request(method, path, **more)

    return lambda method, path, **more: asyncio.run(send(method, path, **more))


@pytest.mark.parametrize(
    ("method", "path", "endpoint"),
    [("GET", "/health", "health"), ("GET", "/v1/models", "models"), ("POST", "/v1/completions", "completions")],
)
def test_a_mistake_is_answered_and_logged_and_its_words_go_to_the_log_alone(
    ask: Ask, caplog: pytest.LogCaptureFixture, method: str, path: str, endpoint: str
) -> None:
    answer = ask(method, path, json={"prompt": "a"} if method == "POST" else None)
    assert answer.status_code == 500 and "private" not in answer.text
    assert answer.json()["error"] == {
        "message": "an error of the gateway; its log has more", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    assert f"an error of the gateway at {endpoint}" in caplog.text and "something private" in caplog.text
    page = ask("GET", "/metrics").text
    assert f'requests_total{{endpoint="{endpoint}",status="500"}} 1' in page
    assert "tandem_gateway_requests_in_work 1\n" in page


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health/", 404), ("GET", "/v1", 404), ("GET", "/", 404), ("GET", "/docs", 404),
        ("GET", "//health", 404),
        ("POST", "/livez", 405), ("OPTIONS", "/v1/completions", 405), ("DELETE", "/v1/models", 405),
    ],
)  # fmt: skip
def test_what_is_no_path_is_refused_and_no_page_of_another_site_is_let_in(
    ask: Ask, method: str, path: str, status: int
) -> None:
    answer = ask(method, path, headers=ORIGIN)
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_host_that_is_none_changes_no_refusal(ask: Ask) -> None:
    for host in ("[", "a/b", "", "\xff"):
        answer = ask("GET", "/nothing", headers={"host": host.encode("latin-1")})
        assert answer.status_code == 404 and answer.json()["error"]["message"] == "there is no /nothing"
