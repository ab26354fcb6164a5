"""Web pages of other sites: what a browser lets them read by --cors-origins, and what none of them may send."""

import json
from typing import Any

import httpx2 as httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem_client.gateway.errors import unavailable
from tandem_client.gateway.exchange import MAX_HEADER_BYTES
from tandem_client.gateway.settings import PROGRAM
from tandem_contract.settings import SettingError
from tests.client.gateway import plain_http
from tests.client.gateway.asked import Mistaken, Noting, Open, asker, connection
from tests.client.gateway.conftest import PAGE, Fronted
from tests.client.gateway.told_service import two_scored

OTHER = "https://other.example"
PATH = "/v1/completions"
PROMPT = {"prompt": "a"}
LONG = "y" * MAX_HEADER_BYTES


class Closed(Open):
    """A guard of a service with tokens."""

    needs_tokens = True


class Unready(Open):
    """A guard that refuses every caller."""

    def check(self) -> None:
        raise unavailable("not yet")


def of_cors(answer: httpx.Response) -> dict[str, str]:
    """The headers that a browser reads."""
    return {name: value for name, value in answer.headers.items() if name.startswith(("access-control-", "vary"))}


def preflight(origin: str, method: str = "POST", **more: str) -> dict[str, str]:
    """The headers of the question that a browser asks before a page's request."""
    wanted = {"access-control-request-headers": "authorization,content-type,x-stainless-lang"}
    return {"origin": origin, "access-control-request-method": method, **wanted, **more}


# Every kind of answer: what the application is before, and the request that gets it.
ANSWERS: dict[str, tuple[Any, Any, str, str, dict[str, Any]]] = {
    "200": (Noting(), None, "POST", "/tokenize", {"json": PROMPT}),
    "400": (Noting(), None, "POST", PATH, {"json": {}}),
    "401": (Noting(), Closed(), "POST", PATH, {"json": PROMPT}),
    "401 of a header": (Noting(), None, "GET", "/v1/models", {"headers": {"authorization": "Basic x"}}),
    "404": (Noting(), None, "GET", "/nothing", {}),
    "405": (Noting(), None, "DELETE", PATH, {}),
    "413": (Noting(), None, "POST", PATH, {"headers": {"content-length": "4194305"}, "content": b""}),
    "415": (Noting(), None, "POST", PATH, {"headers": {"content-encoding": "gzip"}, "content": b"{}"}),
    "418": (Noting(), None, "POST", PATH, {"json": PROMPT}),
    "431": (Noting(), None, "POST", PATH, {"json": PROMPT, "headers": {"x": LONG}}),
    "431 of a preflight": (
        Noting(), None, "OPTIONS", PATH,
        {"headers": {"access-control-request-method": "POST", "access-control-request-headers": LONG}},
    ),
    "500": (Mistaken(), None, "GET", "/v1/models", {}),
    "503": (Noting(), Unready(), "POST", PATH, {"json": PROMPT}),
}  # fmt: skip


def answered(name: str, origin: str, *flags: str) -> httpx.Response:
    """An answer of this kind to a page of the origin, by a gateway with these flags."""
    service, guard, method, path, more = ANSWERS[name]
    headers = {"origin": origin, **more.get("headers", {})}
    answer = asker(service, *flags, guard=guard)(method, path, **more | {"headers": headers})
    assert answer.status_code == int(name[:3])
    return answer


@pytest.mark.parametrize("status", ANSWERS)
@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (PAGE, PAGE, PAGE), (f"{OTHER}, {PAGE}", PAGE, PAGE), ("*", PAGE, "*"), ("null", "null", "null"),
        (PAGE, OTHER, None), (PAGE, f"{PAGE}:8080", None), (PAGE, "null", None),
    ],
)  # fmt: skip
def test_every_answer_tells_the_browser_whether_the_page_may_read_it(
    status: str, origins: str, origin: str, allowed: str | None
) -> None:
    found = of_cors(answered(status, origin, "--cors-origins", origins))
    assert found.get("access-control-allow-origin") == allowed
    assert found["vary"] == "Origin"
    assert "access-control-allow-credentials" not in found


LATE, LONG_HEAD = "408 Request Timeout", "431 Request Header Fields Too Large"


# What a page sends without an end, and the origin that may read the answer.
HEADS = [
    (HttpToolsProtocol, PAGE, f"Origin: {PAGE}\r\nx", PAGE),
    (HttpToolsProtocol, f"{OTHER},{PAGE}", f"origin:{PAGE}\r\nx: y\r\n", PAGE),
    (HttpToolsProtocol, PAGE, f"origin: {OTHER}\r\nx", None),
    (HttpToolsProtocol, PAGE, f"origin: {PAGE}\r\norigin: {OTHER}\r\nx", None),
    (HttpToolsProtocol, PAGE, f"origin: {PAGE}", None),
    (HttpToolsProtocol, "*", "", "*"),
    (HttpToolsProtocol, "", f"origin: {PAGE}\r\nx", None),
    (H11Protocol, PAGE, f"origin: {PAGE}\r\n", None),
    (H11Protocol, "*", f"origin: {PAGE}\r\n", "*"),
]


# h11 bounds a head itself, below our limit.
@pytest.mark.parametrize(
    ("parser", "origins", "head", "allowed", "status"),
    [(*row, status) for row in HEADS for status in (LATE, LONG_HEAD) if row[0] is HttpToolsProtocol or status == LATE],
)
async def test_a_page_reads_why_its_headers_were_not_taken(
    parser: type[Any], origins: str, head: str, allowed: str | None, status: str
) -> None:
    """If they were not complete, and its origin was among those that came."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no head is complete")

    made, wire, _ = connection(parser, app, "--cors-origins", origins)
    made.data_received(f"POST {PATH} HTTP/1.1\r\nhost: a\r\n{head}".encode())
    if status == LATE:
        made._is_late()
    else:
        made.data_received(b"y" * MAX_HEADER_BYTES)
    made.connection_lost(None)
    answer, _, body = wire.written.partition(b"\r\n\r\n")
    first, *lines = answer.decode().split("\r\n")
    found = dict(line.split(": ", 1) for line in lines)
    assert first == f"HTTP/1.1 {status}" and found["content-length"] == str(len(body))
    assert json.loads(body)["error"]["code"] == "connection" and found["connection"] == "close"
    assert found.get("access-control-allow-origin") == allowed
    assert found.get("access-control-expose-headers") == (None if allowed is None else "*")
    assert found.get("vary") == ("Origin" if origins else None)


@pytest.mark.parametrize("status", ANSWERS)
def test_without_the_flag_no_answer_has_a_header_for_pages(status: str) -> None:
    assert of_cors(answered(status, PAGE)) == {}


@pytest.mark.parametrize("guard", [None, Closed(), Unready()], ids=lambda guard: type(guard).__name__)
@pytest.mark.parametrize("path", [PATH, "/v1/models", "/nothing"])
def test_a_preflight_needs_no_token_and_asks_the_service_for_nothing(guard: Any, path: str) -> None:
    service = Noting()
    ask = asker(service, "--cors-origins", PAGE, guard=guard)
    answer = ask("OPTIONS", path, headers=preflight(PAGE, **{"access-control-request-private-network": "true"}))
    assert answer.status_code == 200 and service.requests == []
    found = of_cors(answer)
    assert found["access-control-allow-origin"] == PAGE
    assert found["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert found["access-control-allow-methods"] == "GET, HEAD, POST"
    assert found["access-control-allow-private-network"] == "true"
    # It counts as what it is.
    if guard is None:
        assert 'requests_total{endpoint="other",status="200"} 1' in ask("GET", "/metrics").text


@pytest.mark.parametrize(
    ("origin", "method", "words"),
    [(OTHER, "POST", "Disallowed CORS origin"), (PAGE, "DELETE", "Disallowed CORS method")],
)
def test_a_preflight_that_is_refused_says_which_flag_decides(origin: str, method: str, words: str) -> None:
    answer = asker(Noting(), "--cors-origins", PAGE)("OPTIONS", PATH, headers=preflight(origin, method))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{words}; --cors-origins of the gateway has the origins")
    assert (answer.headers.get("access-control-allow-origin") == PAGE) == (origin == PAGE)


def test_without_the_flag_a_preflight_is_no_method() -> None:
    answer = asker(Noting())("OPTIONS", PATH, headers=preflight(PAGE))
    assert answer.status_code == 405 and of_cors(answer) == {}


@pytest.mark.parametrize(
    ("origins", "words"),
    [
        ("https://app.example/", "browsers send https://app.example$"),
        ("https://App.example/x", "browsers send https://app.example$"),
        ("https://app.example:443", "browsers send https://app.example$"),
        (f"{PAGE},http://[::1]:80", r"browsers send http://\[::1\]$"),
        ("app.example", "--cors-origins has app.example; an origin is SCHEME://HOST or SCHEME://HOST:PORT$"),
        ("https://a:x", "an origin is"),
        ("https://[a", "an origin is"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origins: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        PROGRAM.read(["--cors-origins", origins], {})


def test_origins_of_the_flag() -> None:
    given = f"{PAGE}, http://127.0.0.1:3000,null,chrome-extension://abc,"
    settings = PROGRAM.read([], {"TANDEM_GATEWAY_CORS_ORIGINS": given})
    assert settings.origins == {PAGE, "http://127.0.0.1:3000", "null", "chrome-extension://abc"}
    assert settings.allows(PAGE) and not settings.allows("*") and not PROGRAM.read([], {}).allows(PAGE)


FORM, TEXT, JSON = "application/x-www-form-urlencoded", "text/plain", "application/json"
KINDS = [FORM, TEXT, JSON, "", "application/octet-stream", "application/json; charset=utf-8", f"{FORM}; charset=utf-8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize"])
def test_a_body_is_json_whatever_its_type_says(kind: str, path: str) -> None:
    service = Noting()
    headers = {"content-type": kind} if kind else {}
    content = json.dumps({"messages": [{"role": "user", "content": "a"}]} if "chat" in path else PROMPT)
    answer = asker(service)("POST", path, headers=headers, content=content.encode())
    assert answer.status_code in (200, 418) and len(service.requests) == 1
    answer = asker(service)("POST", path, headers=headers, content=b"prompt=a&max_tokens=3")
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=a", "Multipart/Mixed"])
def test_a_body_in_parts_is_refused_by_its_type(kind: str) -> None:
    answer = asker(Noting())("POST", PATH, headers={"content-type": kind}, content=b'{"prompt": "a"}')
    said = f"the content type is {kind.partition(';')[0].lower()}; a body is one JSON object, without parts and files"
    assert (answer.status_code, answer.json()["error"]["message"]) == (415, said)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [(), ("--cors-origins", PAGE), ("--cors-origins", "*")], ids=str)
@pytest.mark.parametrize("origin", [PAGE, OTHER, "null"])
def test_a_page_that_may_not_call_cannot_send_a_form(kind: str, flags: tuple[str, ...], origin: str) -> None:
    """A browser sends forms, text and bodies without a type to any address without a preflight."""
    service = Noting()
    headers = {"origin": origin} | ({"content-type": kind} if kind else {})
    answer = asker(service, *flags)("POST", PATH, headers=headers, content=json.dumps(PROMPT).encode())
    may_call = flags[1:] == ("*",) or (flags[1:] == (PAGE,) and origin == PAGE)
    is_taken = may_call or kind.startswith(JSON)
    assert answer.status_code == (418 if is_taken else 415) and len(service.requests) == is_taken
    if not is_taken:
        assert "that of a web page's request must be application/json" in answer.json()["error"]["message"]


def test_a_page_reads_a_stream(fronted: Fronted) -> None:
    fronted.service.behaviour = two_scored
    body = {"prompt": [1, 2], "n": 2, "stream": True}
    answer = plain_http.post(f"{fronted.url}{PATH}", json=body, headers={"origin": PAGE})
    plain = plain_http.post(f"{fronted.url}{PATH}", json=body)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-expose-headers"] == "*" and answer.headers["x-request-id"]
    assert answer.headers["content-type"] == plain.headers["content-type"]
    assert answer.text.count("\n\n") == plain.text.count("\n\n") > 4 and answer.text.endswith("data: [DONE]\n\n")
    assert "access-control-allow-origin" not in plain.headers
    asked = httpx.options(f"{fronted.url}{PATH}", headers=preflight(PAGE))
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
