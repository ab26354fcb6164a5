"""What callers without a token can do: no body is read before they are known, and their connections end first."""

import asyncio
import contextlib
import itertools
import json
import ssl
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem_client.gateway import admission as callers
from tandem_client.gateway.accepting import Seats, Turns, origin
from tandem_client.gateway.errors import HttpError, unauthenticated
from tandem_client.gateway.metrics import Meter
from tests.client.fake_service import endless
from tests.client.gateway import plain_http
from tests.client.gateway.asked import connection
from tests.client.gateway.conftest import Fronted, running
from tests.client.gateway.plain_http import connected, everything
from tests.client.gateway.told_service import ToldService
from tests.measure.gateway.attacker import first_message
from tests.rigs.authorities import Authority

KEY, METRICS_KEY = "Bearer tandem_a", "Bearer tandem_m"
PER_ADDRESS = 5
POST = "POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
STREAM = json.dumps({"prompt": "a", "stream": True}).encode()


@pytest.fixture(scope="module")
def closed() -> Iterator[tuple[ToldService, str]]:
    """A service that knows two tokens, and the URL of its gateway."""
    flags = ("--address-connections", str(PER_ADDRESS), "--head-seconds", "60")
    with running(*flags, rights={KEY: ["inference"], METRICS_KEY: ["metrics"]}) as made:
        yield made.service, made.url


UNKNOWN = (b"401 Unauthorized", b"invalid_api_key")
WITHOUT_RIGHT = (b"403 Forbidden", b"needs the right inference; the token has metrics")


LENGTHS = ("content-length: 4194304", "transfer-encoding: chunked", "content-length: 5")


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        *((length, UNKNOWN) for length in LENGTHS),
        *((f"authorization: Bearer tandem_wrong\r\n{length}", UNKNOWN) for length in LENGTHS),
        *((f"authorization: Basic x\r\n{length}", UNKNOWN) for length in LENGTHS),
        *((f"authorization: {METRICS_KEY}\r\n{length}", WITHOUT_RIGHT) for length in LENGTHS[:2]),
    ],
)
def test_a_caller_that_may_not_call_is_refused_before_its_body(
    closed: tuple[ToldService, str], headers: str, words: tuple[bytes, ...]
) -> None:
    service, url = closed
    with connected(url) as sock:
        sock.sendall(f"{POST}{headers}\r\n\r\n".encode())
        # No byte of the body was sent, and the connection has ended.
        answer = everything(sock)
    assert all(each in answer for each in (*words, b"connection: close"))
    assert service.requests == []


def test_no_caller_has_the_rights_of_the_gateways_own_certificate() -> None:
    with running(rights={"": ["control", "inference", "metrics"], KEY: ["inference"]}) as made:
        for path in ("/v1/models", "/metrics"):
            assert plain_http.get(f"{made.url}{path}").status_code == 401
        assert plain_http.post(f"{made.url}/v1/completions", json={"prompt": "a"}).status_code == 401
        assert plain_http.get(f"{made.url}/v1/models", headers={"authorization": KEY}).status_code == 200


def test_a_trailer_gives_no_authorization(closed: tuple[ToldService, str]) -> None:
    service, url = closed
    body = b"%x\r\n%b\r\n0\r\nauthorization: %b\r\n\r\n" % (len(STREAM), STREAM, KEY.encode())
    with connected(url) as sock:
        sock.sendall(f"{POST}transfer-encoding: chunked\r\n\r\n".encode() + body)
        assert b"401 Unauthorized" in everything(sock)
    assert service.requests == []


def test_the_metrics_have_the_rules_of_the_services_page(closed: tuple[ToldService, str], fronted: Fronted) -> None:
    _, url = closed
    for key, status in {"": 401, "Bearer tandem_wrong": 401, KEY: 403, METRICS_KEY: 200}.items():
        answer = plain_http.get(f"{url}/metrics", headers={"authorization": key} if key else {})
        assert answer.status_code == status, key
    # A service without a token file has no rule.
    assert plain_http.get(f"{fronted.url}/metrics").status_code == 200


def test_an_address_has_so_many_connections_whose_callers_are_not_known(closed: tuple[ToldService, str]) -> None:
    service, url = closed
    service.behaviour = endless
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(url)) for _ in range(PER_ADDRESS)]
        with connected(url) as one_more:
            assert everything(one_more) == b""
        head = f"{POST}authorization: {KEY}\r\ncontent-length: {len(STREAM)}\r\n\r\n"
        strangers[0].sendall(head.encode() + STREAM)
        assert b"200 OK" in strangers[0].recv(1000)
        # Its caller is known now, so its place among strangers is free.
        with connected(url) as one_more:
            one_more.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert b"200 OK" in everything(one_more)
    assert service.endings[-1].wait()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03", first_message(), b"GET / HTTP/1.1\r\n\r\n"])
def test_a_handshake_that_stops_frees_its_place(tls_url: tuple[str, Authority], sent: bytes) -> None:
    url, authority = tls_url
    with connected(url.replace("https", "http")) as sock:
        sock.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            everything(sock)
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    page = httpx.get(f"{url}/metrics", verify=trust).text
    assert "tandem_gateway_connections 1\n" in page


@pytest.fixture(scope="module")
def tls_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Authority]]:
    """The HTTPS address of a gateway with one place for strangers, and the authority of its certificate."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    pair = authority.issue("gateway", "IP:127.0.0.1")
    tls = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    with running(*tls, "--head-seconds", "0.3") as made:
        yield made.url, authority


def test_bodies_that_come_slowly_take_no_place_of_a_request() -> None:
    """A service without tokens: everybody may begin a body."""
    flags = ("--max-requests", "1", "--max-connections", "3")
    with running(*flags) as made, contextlib.ExitStack() as stack:
        for _ in range(6):
            # Three of them end for the next ones.
            sock = stack.enter_context(connected(made.url))
            sock.sendall(f"{POST}content-length: 1000\r\n\r\n{{".encode())
        assert plain_http.post(f"{made.url}/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("parser", [H11Protocol, HttpToolsProtocol])
async def test_a_body_is_read_when_it_is_asked_for_and_what_follows_it_is_no_header(parser: type[Any]) -> None:
    names = list[set[bytes]]()
    asks = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        names.append({name for name, _ in scope["headers"]})
        await asks.wait()
        while (await receive())["more_body"]:
            pass
        await asyncio.Event().wait()

    made, wire, seats = connection(parser, app)
    made.data_received(f"{POST}transfer-encoding: chunked\r\n\r\n1\r\n{{\r\n".encode())
    assert not wire.is_read
    made.data_received(b"0\r\nauthorization: Bearer a\r\n\r\n")
    await asyncio.sleep(0)
    assert not wire.is_read
    asks.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.is_read
    made.connection_lost(None)
    assert seats.take("b") is not None
    assert names == [{b"host", b"transfer-encoding"}]


def test_the_oldest_of_the_larger_group_ends_and_nothing_that_is_in_work() -> None:
    ended = list[str]()

    def take(name: str) -> Any:
        seat = seats.take(name)
        if seat is not None:
            seat.end = lambda: ended.append(name)
        return seat

    seats = Seats(Meter(), max_connections=6, per_address=2)
    a, b, c, d = (take(name) for name in "abcd")
    for seat in (a, b):
        seats.know(seat)
    seats.begin(a)
    assert [take(name) for name in ("e", "f")].count(None) == 0
    # Four strangers, one guest, one in work.
    assert take("g") is not None and ended == ["c"]
    seats.leave(c)
    for seat in (b, d):
        seats.know(seat)
        seats.begin(seat)
    for name in "hij":
        assert take(name) is not None
    assert ended == ["c", "e", "f", "g"]
    seats.rest(a)
    seats.rest(b)
    seats.rest(d)
    # Three guests, three strangers.
    assert take("k") is not None and ended[-1] == "h"
    assert take("k") is not None and take("k") is None, "an address has two strangers"
    for seat in (a, b, d):
        seats.leave(seat)
    one = take("l")
    assert one is not None and ended[-1] == "i"


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4%eth0", "20010db800010002"),
        ("2001:db8:1:2:ffff::", "20010db800010002"),
    ],
)
def test_an_address_of_ipv6_is_that_of_its_site(host: str, found: str) -> None:
    assert origin(host) == found


@pytest.mark.parametrize("per_second", [0, 1])
async def test_addresses_take_turns_in_handshakes_and_each_keeps_its_rate(per_second: int) -> None:
    turns, order = Turns(per_second), list[str]()

    async def one(address: str) -> None:
        await turns.wait(address)
        order.append(address)

    tasks = [asyncio.create_task(one("a")) for _ in range(50)]
    tasks.append(asyncio.create_task(one("b")))
    if not per_second:
        await asyncio.gather(*tasks)
        assert order[:2] == ["a", "b"] and len(order) == 51
        return
    await tasks[-1]
    await asyncio.create_task(one("c"))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order.count("a") < 50 and order[-1] == "c"


@pytest.mark.parametrize("num_addresses", [1, 3, 50])
async def test_each_turn_of_the_event_loop_has_one_handshake(num_addresses: int) -> None:
    """Fewer would hold callers up while streams make the turns long, and more would hold up the streams."""
    turns, number, given_at = Turns(0), itertools.count(), list[int]()
    loop, now = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal now
        now = next(number)
        if len(given_at) < 50:
            loop.call_soon(count)

    async def one(address: str) -> None:
        await turns.wait(address)
        given_at.append(now)

    count()
    await asyncio.gather(*(one(str(i % num_addresses)) for i in range(50)))
    assert given_at == [given_at[0] + i for i in range(50)]


class Rights:
    """A service that knows one token, and counts the questions."""

    def __init__(self) -> None:
        self.asked = list[str]()

    async def rights(self, metadata: Any) -> frozenset[str]:
        [(_, value)] = metadata
        self.asked.append(value)
        await asyncio.sleep(0)
        if value != "Bearer good":
            raise unauthenticated("no")
        return frozenset({"inference"})


async def test_the_service_is_asked_once_for_a_token_and_refused_ones_push_no_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "KNOWN_SECONDS", 1e9)
    monkeypatch.setattr(callers, "REFUSED_SECONDS", 1e9)
    service = Rights()
    known: Any = callers.Callers(service)  # pyright: ignore[reportArgumentType]
    assert await asyncio.gather(*(known.rights("good") for _ in range(9))) == [{"inference"}] * 9
    for _ in range(2):
        with pytest.raises(HttpError, match="no"):
            await known.rights("bad")
    assert service.asked == ["Bearer good", "Bearer bad"]
    for i in range(3000):
        with contextlib.suppress(HttpError):
            await known.rights(f"bad {i}")
    assert await known.rights("good") == {"inference"} and service.asked.count("Bearer good") == 1
    assert sum(len(each) for each in (known._known, known._refused, known._asked)) <= 1025
    monkeypatch.setattr(callers, "KNOWN_SECONDS", 0.0)
    # A token that was known is asked for again when its time is over: it may have been revoked.
    again: Any = callers.Callers(service)  # pyright: ignore[reportArgumentType]
    for _ in itertools.repeat(None, 2):
        await again.rights("good")
    assert service.asked.count("Bearer good") == 3
