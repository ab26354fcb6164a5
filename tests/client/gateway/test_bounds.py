"""What a caller may send at most: bodies, headers, time, nesting; and the answer to a wrong request."""

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import grpc.aio
import httpx2 as httpx
import pytest
from starlette.requests import ClientDisconnect, Request
from tandem.v1 import inference_pb2
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem_client.gateway.accepting import SEAT, Seats
from tandem_client.gateway.app import App
from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.exchange import EventStream, Places, read
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.settings import PROGRAM
from tests.client import fake_service as fake
from tests.client.gateway import plain_http
from tests.client.gateway.asked import Noting, Open, connection
from tests.client.gateway.conftest import Fronted, running
from tests.client.gateway.plain_http import connected, everything


def post(fronted: Fronted, path: str, body: Any, **headers: str) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return plain_http.post(
        f"{fronted.url}{path}", content=data, headers={"content-type": "application/json", **headers}
    )


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b'{"prompt": NaN}', None, "NaN is not JSON"),
        (b"[1]", None, "not a JSON object"),
        (b"\xff", None, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, None, "nested too deeply"),
        (b'{"max_tokens": ' + b"9" * 10_000 + b"}", None, "not valid JSON"),
        (b"", None, "not valid JSON"),
        (b'{"prompt": "a", "temperature": -Infinity}', None, "-Infinity is not JSON"),
        (b'{"prompt": "a" \xed\xa0\x80}', None, "not valid JSON"),
        (b'{"prompt": "a"} {}', None, "not valid JSON"),
        (b'{"prompt": "a", "max_tokens": 016}', None, "not valid JSON"),
        (b'{"prompt": "a\n"}', None, "not valid JSON"),
        # What JSON may hold, and a request may not.
        (b'{"prompt": "a", "temperature": 1e400}', "temperature", "temperature"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens", "max_tokens"),
        (b'{"prompt": "\\ud800"}', "prompt", "prompt"),
        (b'{"prompt": ["a", "b\\udc00"]}', "prompt[1]", "prompt[1]"),
        (b'{"prompt": "a", "\\ud800": 1}', "\\ud800", "\\ud800"),
        (b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}', "logit_bias[\ufffd\ufffd\ufffd]", "logit_bias"),
        (b'{"prompt": "a", "prompt": 7}', "prompt", "prompt"),
    ],
)
def test_a_body_that_is_no_request(fronted: Fronted, body: bytes, param: str | None, words: str) -> None:
    answer = post(fronted, "/v1/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"] and fronted.service.requests == []


def test_the_last_of_two_values_counts_and_half_a_character_in_a_schema_passes(fronted: Fronted) -> None:
    assert post(fronted, "/v1/completions", b'{"prompt": 7, "prompt": "a"}').status_code == 200
    assert fronted.service.generated.text == "a"
    body = b'{"prompt": "a", "guided_json": {"const": "\\ud800", "enum": [123456789012345678901]}}'
    assert post(fronted, "/v1/completions", body).status_code == 200
    schema = fronted.service.generated.constraint.json_schema
    assert schema == '{"const":"\\ud800","enum":[123456789012345678901]}'


def test_json_is_taken_or_refused_at_every_depth(fronted: Fronted) -> None:
    statuses = list[int]()
    for depth in (100, *range(900, 1000), 100_000):
        tools = b'[{"a": ' + b"[" * depth + b"]" * depth + b"}]"
        body = b'{"messages": [{"role": "user", "content": "a"}], "tools": ' + tools + b"}"
        statuses.append(post(fronted, "/v1/chat/completions", body).status_code)
    assert statuses[0] == 200 and {*statuses} == {200, 400} and statuses == sorted(statuses)


# By its length, and without one once it is too large: its end is not sent.
@pytest.mark.parametrize(
    ("length", "body"),
    [
        (b"content-length: 4194305", b""),
        (b"transfer-encoding: chunked", (b"10000\r\n" + b" " * 65536 + b"\r\n") * 64 + b"1\r\n \r\n"),
    ],
    ids=["length", "chunks"],
)
def test_a_body_that_is_too_large_is_refused(fronted: Fronted, length: bytes, body: bytes) -> None:
    with connected(fronted.url) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + length + b"\r\n\r\n" + body)
        answer = everything(sock)
    assert b" 413 " in answer and b"the body has 4,194,305 bytes; the limit is 4,194,304" in answer
    assert fronted.service.requests == []


def test_a_body_gives_back_its_room_however_it_ends() -> None:
    room, settings = Places(2000, is_shared=False), PROGRAM.read(["--max-body-bytes", "1024"], {})
    piece, last = ({"type": "http.request", "body": b" " * 700, "more_body": more} for more in (True, False))
    bodies: list[tuple[list[dict[str, Any]], type[Exception] | None]] = [
        ([last], None),
        ([piece, last], HttpError),
        ([piece, {"type": "http.disconnect"}], ClientDisconnect),
    ]

    async def read_all(body: list[dict[str, Any]]) -> None:
        left = iter(body)

        async def receive() -> dict[str, Any]:
            return next(left)

        headers = [(b"transfer-encoding", b"chunked")]
        request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
        await read(request, room, "a", settings)

    for body, error in bodies:
        with pytest.raises(error) if error is not None else contextlib.nullcontext():
            asyncio.run(read_all(body))
        assert room.num_taken == 0


@pytest.fixture(scope="module")
def brisk() -> Iterator[str]:
    """The URL of a gateway that waits for a moment."""
    with running("--head-seconds", "0.2", "--body-seconds", "0.2") as made:
        yield made.url


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\nconnection: close\r\n\r\n{",
    ],
    ids=["no head", "half a head", "half a body"],
)
def test_what_comes_too_slowly(brisk: str, sent: bytes) -> None:
    with connected(brisk) as sock:
        sock.sendall(sent)
        assert b"408 Request Timeout" in everything(sock)


def test_headers_that_are_too_large(fronted: Fronted) -> None:
    with connected(fronted.url) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n")
        answer = b""
        try:
            for _ in range(100):
                sock.sendall(b"x: " + b"y" * 1000 + b"\r\n")
            answer = everything(sock)
        except OSError:
            answer = b"closed"
        assert b"431" in answer or answer == b"closed"
    answer = plain_http.get(f"{fronted.url}/livez", headers={"x": "y" * 40_000})
    assert answer.status_code == 431


STREAM = json.dumps({"prompt": "a", "stream": True}).encode()
IN_WORK = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(STREAM), STREAM)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: a\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nhost: ", b"y" * 1000),
        (b"GET /", b"y" * 1000),
        (b"", b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"),
    ],
)
def test_what_follows_a_request_in_work_is_bounded(fronted: Fronted, first: bytes, again: bytes) -> None:
    fronted.service.behaviour = fake.endless
    with connected(fronted.url) as sock:
        sock.sendall(IN_WORK)
        assert b"200 OK" in sock.recv(1000)
        with pytest.raises(OSError):
            sock.sendall(first + again * (20_000_000 // len(again)))
    assert fronted.service.endings[0].wait()
    assert plain_http.get(f"{fronted.url}/livez").status_code == 200


def test_a_few_requests_may_be_sent_at_once(fronted: Fronted) -> None:
    with connected(fronted.url) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n" * 9)
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert everything(sock).count(b"200 OK") == 10


@pytest.mark.parametrize("trace", [b"\xff", b"a" * 20_000, b"a\tb"])
def test_a_trace_that_is_malformed_is_ignored(fronted: Fronted, trace: bytes) -> None:
    assert plain_http.get(f"{fronted.url}/v1/models", headers={b"traceparent": trace}).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [("Bearer a", 200), ("bearer a", 200), ("Basic a", 401), ("Bearer a b", 401), ("Bearer " + "a" * 600, 401)],
)
def test_the_authorization_header(fronted: Fronted, authorization: str, status: int) -> None:
    answer = plain_http.get(f"{fronted.url}/v1/models", headers={"authorization": authorization})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "invalid_api_key"


def test_tokenize_and_detokenize(fronted: Fronted) -> None:
    found = post(fronted, "/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert found == {"count": 3, "max_model_len": 1024, "tokens": [97, 98, 99], "token_strs": ["<97>", "<98>", "<99>"]}
    found = post(fronted, "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(found["tokens"]) == b"<user>a" and found["token_strs"] is None
    assert post(fronted, "/detokenize", {"tokens": [104, 105]}).json() == {"prompt": "hi"}
    for adds in (True, False):
        assert post(fronted, "/tokenize", {"prompt": "a", "add_special_tokens": adds}).status_code == 200
        assert fronted.service.requests[-1].add_special_tokens is adds
    assert post(fronted, "/detokenize", {"tokens": [-1]}).json()["error"]["param"] == "tokens[0]"


def test_health_and_metrics(fronted: Fronted) -> None:
    fronted.service.serving(True)
    assert plain_http.get(f"{fronted.url}/health").status_code == 200
    fronted.service.serving(False)
    answer = plain_http.get(f"{fronted.url}/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "not serving", "reason": None, "since": None})
    fronted.service.health.words = (("tandem-reason", "weights_refused"), ("tandem-since", "1700000000.250"))
    answer = plain_http.get(f"{fronted.url}/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not serving", "reason": "weights_refused", "since": 1700000000.25}
    for ask in (plain_http.get, plain_http.head):
        assert ask(f"{fronted.url}/livez").status_code == 200
    fronted.service.serving(True)
    post(fronted, "/v1/completions", {"prompt": "a", "stream": True})
    page = plain_http.get(f"{fronted.url}/metrics").text
    assert 'tandem_gateway_requests_total{endpoint="completions",status="200"}' in page
    assert plain_http.get(f"{fronted.url}/version").json()["version"]


@pytest.mark.parametrize("echo", [False, True])
def test_waits_are_comments_that_clients_ignore(fronted: Fronted, echo: bool) -> None:
    fronted.service.behaviour = fake.waits_first
    body = {"prompt": "hi", "stream": True, "echo": echo}
    answer = plain_http.post(f"{fronted.url}/v1/completions", json=body)
    events = answer.text.split("\n\n")
    assert [event for event in events if event.startswith(":")] == [": waiting: why 1", ": waiting: why 2"]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == ("hi" if echo else "") + "Réturn"
    whole = plain_http.post(f"{fronted.url}/v1/completions", json={"prompt": "hi"}).json()
    assert whole["choices"][0]["text"] == "Réturn"


def test_a_silent_stream_gets_pings_and_a_full_gateway_refuses() -> None:
    with running("--max-requests", "1", "--ping-seconds", "0.3", behaviour=fake.endless) as made:
        with connected(made.url) as sock:
            sock.sendall(IN_WORK)
            got = b""
            while b'"R"' not in got:
                got += sock.recv(65536)
            refused = plain_http.post(f"{made.url}/v1/completions", content=STREAM)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_requests"
            assert plain_http.get(f"{made.url}/livez").status_code == 200
            while b": ping\n\n" not in got:
                got += sock.recv(65536)
        assert made.service.endings[0].wait()


def test_sigterm_lets_streams_end() -> None:
    body = {"prompt": "a", "stream": True}
    with running("--grace-seconds", "0.2", behaviour=fake.endless) as made:
        with plain_http.stream("POST", f"{made.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert '"R"' in next(lines)
            made.gateway.signal(15)
            rest = "\n".join(lines)
        assert "the gateway ended the request" in rest and "[DONE]" not in rest
        # One more signal would end it at once.
        assert made.gateway.wait() == 0, made.gateway.output()


def flood(request: inference_pb2.GenerateRequest, ending: fake.Ending) -> Iterator[inference_pb2.GenerateResponse]:
    """Sends until the client leaves."""
    yield fake.accepted(request)
    for i in itertools.count():
        yield fake.delta(i, [5], "x" * 10_000)


def large(request: inference_pb2.GenerateRequest, ending: fake.Ending) -> Iterator[inference_pb2.GenerateResponse]:
    """An answer that no socket buffer holds."""
    yield fake.accepted(request)
    for i in range(100):
        yield fake.delta(i, [5], "x" * 200_000)
    yield fake.finished(100)
    yield fake.summary(100)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Fronted]:
    """A gateway that waits 0.4 s for readers, for one request at a time."""
    with running("--ping-seconds", "0.1", "--max-requests", "1") as made:
        yield made
    # No line for a client, which could write as many as it likes.
    own = re.compile("gateway listening|stopping: |stopped")
    assert [line for line in made.gateway.lines if not own.search(line)] == []


@pytest.mark.parametrize("more", ["", "connection: close\r\n"])
@pytest.mark.parametrize(("behaviour", "is_stream"), [(flood, True), (large, True), (large, False)])
def test_a_reader_that_stalls_is_left(
    impatient: Fronted, behaviour: fake.Behaviour, is_stream: bool, more: str
) -> None:  # fmt: skip
    impatient.service.behaviour = behaviour
    body = json.dumps({"prompt": "a", "stream": is_stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{more}content-length: {len(body)}\r\n\r\n"
    with connected(impatient.url) as sock:
        sock.sendall(head.encode() + body)
        assert b"200 OK" in sock.recv(1000)
        # Nothing more is read, and the answer keeps its place until the connection ends.
        assert post(impatient, "/v1/completions", body).status_code == 429
        while "tandem_gateway_connections 1\n" not in plain_http.get(f"{impatient.url}/metrics").text:
            pass
        assert impatient.service.endings[-1].wait()
    impatient.service.behaviour = fake.one_completion
    assert post(impatient, "/v1/completions", body).status_code == 200


def test_a_reader_that_is_slow_gets_everything() -> None:
    # It waits 4 s for readers, so that one without CPU time for a while is not left.
    with running("--ping-seconds", "1") as made:
        made.service.behaviour = large
        with plain_http.stream("POST", f"{made.url}/v1/completions", json={"prompt": "a"}) as answer:
            text = ""
            for number, piece in enumerate(answer.iter_text(1_000_000)):
                text += piece
                if number < 6:
                    # Less than the gateway waits, and more in all.
                    time.sleep(0.8)
    assert len(json.loads(text)["choices"][0]["text"]) == 20_000_000


async def test_no_ping_follows_the_end_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping that is due just when the stream ends is not sent."""
    sent, ticks, has_pinged, sleep = list[tuple[int, bytes]](), list[float](), asyncio.Event(), asyncio.sleep

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append((len(ticks), message.get("body", b"")))
        has_pinged.set()

    async def tick(seconds: float) -> None:
        ticks.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", tick)
    stream = EventStream(send)
    keeping = asyncio.create_task(stream.keep_alive(15.0))
    await has_pinged.wait()
    keeping.cancel()
    await stream.close(b"last")
    await stream.ping()
    # Silence counts in thirds of the time.
    assert sent[0] == (3, b": ping\n\n") and {*ticks} == {5.0}
    assert [body for _, body in sent[1:]] == [b"last"]


class Call:
    """A call of Generate that accepts the request and then waits, or ends."""

    def __init__(self, end: HttpError | None, *, waits: bool) -> None:
        self._end, self._waits = end, waits
        self._messages = iter([inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted())])

    async def read(self) -> Any:
        if (message := next(self._messages, None)) is not None:
            return message
        if self._waits:
            await asyncio.Event().wait()
        if self._end is not None:
            raise self._end
        return grpc.aio.EOF

    async def initial_metadata(self) -> tuple[()]:
        return ()

    def cancel(self) -> None: ...


@pytest.mark.parametrize("end", ["whole", "error", "left"])
async def test_nothing_of_a_stream_stays_behind_it(end: str) -> None:
    """However it ends. What sends its pings would otherwise live as long as the gateway."""
    call, last = Call(HttpError(500, "it broke") if end == "error" else None, waits=end == "left"), list[bytes]()
    service, seats = Noting(), Seats(Meter(), max_connections=1)
    service.inference.Generate = lambda request, metadata: call  # pyright: ignore[reportUnknownLambdaType]
    has_begun, requests = asyncio.Event(), iter([{"type": "http.request", "body": STREAM}])

    async def receive() -> Any:
        if (request := next(requests, None)) is not None:
            return request
        await (has_begun if end == "left" else asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        has_begun.set()
        last.append(message.get("body", b""))

    app: Any = App(PROGRAM.read([], {}), service, Meter(), Open(), seats)  # pyright: ignore[reportArgumentType]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    headers = [(b"content-type", b"application/json")]
    await app({**scope, "headers": headers, "state": {SEAT: seats.take("a")}}, receive, send)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    ends = {"whole": b"[DONE]", "error": b"it broke", "left": b"because it stops"}
    assert ends[end] in last[-1]


@pytest.mark.parametrize("parser", [H11Protocol, HttpToolsProtocol])
def test_no_timer_of_a_connection_stays_behind_it(parser: type[Any]) -> None:
    class Loop(asyncio.SelectorEventLoop):
        def call_at(self, *arguments: Any, **more: Any) -> asyncio.TimerHandle:
            timers.append(super().call_at(*arguments, **more))
            return timers[-1]

    async def scenario() -> None:
        made, _, _ = connection(parser, None)
        made.data_received(b"POST / HTTP/1.1\r\nhost: a\r\nx")
        made.connection_lost(None)

    timers = list[asyncio.TimerHandle]()
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(scenario())
    assert len(timers) == 2 and all(timer.cancelled() for timer in timers)
