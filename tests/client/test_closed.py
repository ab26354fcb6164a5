"""A client that was closed, and one that a fork brought into a child: every call says so, at once."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem_client import AsyncClient, Client, calls, errors
from tests.client import fake_service
from tests.client.fake_service import FakeService
from tests.rigs.waiting import TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
# Each public method that makes a call, with what it needs; a test compares the names with the class.
CALLS: dict[str, Callable[[Any], Any]] = {
    "tokenize": lambda client: client.tokenize("a"),
    "detokenize": lambda client: client.detokenize([1]),
    "render_chat": lambda client: client.render_chat([{"role": "user", "content": "a"}]),
    "abort": lambda client: client.abort("a"),
    "model_info": lambda client: client.model_info(),
    "load": lambda client: client.load(),
    "health": lambda client: client.health(),
    "flush_cache": lambda client: client.flush_cache(),
    "quarantine": lambda client: client.quarantine(),
    "clear_quarantine": lambda client: client.clear_quarantine(),
    "drain": lambda client: client.drain(),
    "update_weights": lambda client: client.update_weights("/f", version="2"),
    "wait_ready": lambda client: client.wait_ready(TIMEOUT_SECONDS),
    "generate": lambda client: client.generate("a"),
    "resume": lambda client: client.resume("a", b"b"),
}


def test_every_method_that_calls_is_listed() -> None:
    for kind in (Client, AsyncClient):
        public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
        assert public == {*CALLS, "close"}
    assert {name for name in vars(calls) if name in CALLS} == set(CALLS) - {"wait_ready", "generate", "resume"}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_client_says_so(service: FakeService, name: str) -> None:
    said = f"^the client of {service.address} is closed; make a new one$"
    client = Client(service.address)
    client.close()
    client.close()
    with pytest.raises(errors.ClientClosed, match=said):
        # A call that tells its progress begins with the first step.
        next(iter(CALLS[name](client)))

    async def call() -> None:
        client = AsyncClient(service.address)
        await client.close()
        await client.close()
        made = CALLS[name](client)
        if hasattr(made, "__aiter__"):
            await anext(made)
        else:
            await made

    with pytest.raises(errors.ClientClosed, match=said):
        asyncio.run(call())
    assert not service.requests


@pytest.mark.parametrize("resume", [False, True])
def test_closing_a_client_ends_its_streams_with_that_error(service: FakeService, resume: bool) -> None:
    service.behaviour = fake_service.endless
    client = Client(service.address)
    stream = client.generate("a", resume=resume)
    assert next(stream).text == "R"
    client.close()
    with pytest.raises(errors.ClientClosed):
        next(stream)
    stream.close()

    async def read() -> None:
        client = AsyncClient(service.address)
        stream = client.generate("a", resume=resume)
        assert (await anext(stream)).text == "R"
        await client.close()
        with pytest.raises(errors.ClientClosed):
            await anext(stream)
        stream.close()

    asyncio.run(read())


CHILD = """
import asyncio, multiprocessing, os, signal, sys, traceback
from tandem_client import AsyncClient, Client, errors
from tests.client.test_closed import CALLS

address, how = sys.argv[1:]

def tried(call):
    try:
        call()
    except errors.ClientForked as error:
        assert error.message.startswith(f"the client of {address} was made in process {os.getppid()}, "), error
        return
    raise AssertionError("no error")

async def of_loop(loop_client, stream):
    for call in CALLS.values():
        try:
            made = call(loop_client)
            await (anext(made) if hasattr(made, "__aiter__") else made)
        except errors.ClientForked:
            continue
        raise AssertionError("no error")
    try:
        await anext(stream)
    except errors.ClientForked:
        await loop_client.close()
        stream.close()
        return
    raise AssertionError("no error")

def child():
    signal.alarm(60)
    for name, call in CALLS.items():
        tried(lambda: next(iter(call(client))))
    tried(lambda: next(stream))
    stream.close()
    client.close()
    with Client(address) as own:
        assert own.health() and len(list(own.generate("a"))) == 2
    # The loop is the parent's too, and its task stands still here.
    asyncio.events._set_running_loop(None)
    asyncio.run(of_loop(loop_client, loop_stream))
    async def fresh():
        for unused in (before, AsyncClient(address)):
            try:
                await unused.health()
            except errors.ClientForked as error:
                assert "which used an AsyncClient before the fork; use Client here" in error.message
            else:
                raise AssertionError("no error")
    asyncio.run(fresh())
    print("child", flush=True)

async def main():
    global loop_client, loop_stream, before
    before = AsyncClient(address)
    loop_client = AsyncClient(address)
    assert await loop_client.health()
    loop_stream = loop_client.generate("a")
    await anext(loop_stream)
    if how == "fork":
        pid = os.fork()
        if not pid:
            try:
                child()
            except BaseException as error:
                traceback.print_exception(error)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    else:
        made = multiprocessing.get_context("fork").Process(target=child)
        made.start()
        made.join()
        assert made.exitcode == 0
    assert [delta.text async for delta in loop_stream] == ["turn"]
    await loop_client.close()

client = Client(address)
stream = client.generate("a")
next(stream)
asyncio.run(main())
# The parent's connection is whole.
assert [delta.text for delta in stream] == ["turn"] and client.health()
client.close()
print("parent")
"""


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_child_is_told_that_the_client_is_its_parents(service: FakeService, how: str) -> None:
    """Without it, a stream that the parent opened hangs in the child, and both would use one connection."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "client", ROOT / "protos", ROOT / ".stubs")))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, service.address, how],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "child\nparent\n"), done.stderr
