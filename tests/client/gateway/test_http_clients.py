"""What HTTP clients send besides JSON: old versions, wishes for newer ones, compressed bodies."""

import contextlib
import gzip
import json
import socket

import pytest

from tests.client.gateway.conftest import Fronted
from tests.client.gateway.plain_http import connected, everything

PATH = "/v1/completions"
ASKED = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
STREAMED = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
# As Java's client sends them.
UPGRADE = ("connection: Upgrade, HTTP2-Settings, close", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")


def head(*lines: str, length: int | None = None, version: str = "1.1") -> bytes:
    body = [] if length is None else [f"content-length: {length}"]
    fixed = [f"POST {PATH} HTTP/{version}", "host: a", "content-type: application/json"]
    return "\r\n".join([*fixed, *lines, *body, "\r\n"]).encode()


def answer(fronted: Fronted, *pieces: bytes) -> tuple[bytes, bytes]:
    """Head and body of all that the gateway sends until it closes the connection. Each piece is a write of its own."""
    with connected(fronted.url) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        before, _, after = everything(sock).partition(b"\r\n\r\n")
    return before, after


@pytest.mark.parametrize("more", [(), ("connection: keep-alive",)])
def test_an_old_client_gets_no_chunks(fronted: Fronted, more: tuple[str, ...]) -> None:
    shown, body = answer(fronted, head(*more, length=len(STREAMED), version="1.0") + STREAMED)
    assert b"transfer-encoding" not in shown and b"connection: close" in shown
    events = body.decode().strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    # An answer of a known length has it.
    shown, body = answer(fronted, head(*more, length=len(ASKED), version="1.0") + ASKED)
    assert b"content-length: %d\r\n" % len(body) in shown and json.loads(body)["choices"]
    shown, body = answer(fronted, b"HEAD /v1/models HTTP/1.0\r\n\r\n")
    assert b" 200 " in shown and not body


WHOLE = head(*UPGRADE, length=len(ASKED))
# The same request in different pieces.
UPGRADES: dict[str, list[bytes]] = {
    "at once": [WHOLE + ASKED],
    "body later": [WHOLE, ASKED],
    "body in pieces": [WHOLE + ASKED[:5], ASKED[5:]],
    "chunks": [head(*UPGRADE, "transfer-encoding: chunked"), b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASKED), ASKED)],
    "letter by letter": [bytes([letter]) for letter in WHOLE + ASKED],
}


@pytest.mark.parametrize("pieces", UPGRADES.values(), ids=UPGRADES)
def test_a_wish_for_another_protocol_is_ignored(fronted: Fronted, pieces: list[bytes]) -> None:
    shown, body = answer(fronted, *pieces)
    assert shown.startswith(b"HTTP/1.1 200 ") and json.loads(body)["choices"][0]["text"]


def test_the_requests_behind_a_wish_are_answered_in_order(fronted: Fronted) -> None:
    wish = head(*UPGRADE[1:], "connection: Upgrade", length=len(ASKED)) + ASKED
    last = head("connection: close", length=2) + b"{}"
    shown, body = answer(fronted, wish * 3 + last)
    everything = shown + body
    assert everything.count(b"HTTP/1.1 200 ") == 3 and everything.count(b"HTTP/1.1 400 ") == 1
    assert b"prompt is missing" in everything.rpartition(b"HTTP/1.1")[2]


def test_many_wishes_in_one_piece_end_the_connection(fronted: Fronted) -> None:
    wish = b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        answer(fronted, wish * 2000)
    # The gateway still serves others; the fixture looks for tracebacks.
    assert answer(fronted, WHOLE + ASKED)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("content-encoding: gzip", "the content encoding is gzip; it must be identity"),
        ("Content-Encoding: zstd, gzip", "the content encoding is zstd, gzip; it must be identity"),
        ("transfer-encoding: gzip, chunked", "the transfer encoding is gzip, chunked; it must be chunked"),
    ],
)
def test_a_compressed_body_is_refused_by_the_name_of_its_header(fronted: Fronted, line: str, name: str) -> None:
    data = gzip.compress(ASKED)
    chunked = line.startswith("transfer")
    sent = head("connection: close", line, length=None if chunked else len(data))
    shown, body = answer(fronted, sent + (b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if chunked else data))
    assert b" 415 " in shown and b"accept-encoding: identity" in shown
    assert json.loads(body)["error"]["message"].startswith(name)
    assert fronted.service.requests == []


@pytest.mark.parametrize(
    "body", [ASKED, b"\xef\xbb\xbf" + ASKED, ASKED.decode().encode("utf-16")], ids=["utf-8", "mark", "utf-16"]
)
def test_what_means_nothing_is_taken(fronted: Fronted, body: bytes) -> None:
    lines = ("connection: close", "content-encoding: identity", "accept-encoding: gzip, br", "expect: 100-continue")
    shown, found = answer(fronted, head(*lines, length=len(body)) + body)
    assert b" 200 " in shown + found and b'"choices"' in found
