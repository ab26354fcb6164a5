"""A client that was closed, and one that a fork brought into a child: every call says so, at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tandem_client import AsyncClient, Client, calls, errors
from tests.client import fake_service
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService
from tests.rigs.processes import child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS

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
    "list_requests": lambda client: client.list_requests(),
    "wait_ready": lambda client: client.wait_ready(TIMEOUT_SECONDS),
    "generate": lambda client: client.generate("a"),
    "resume": lambda client: client.resume("a", b"b"),
}


def test_every_method_that_calls_is_listed() -> None:
    for kind in (Client, AsyncClient):
        public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
        # The latter calls list_requests for each page.
        assert public == {*CALLS, "close", "all_requests"}
    assert {name for name in vars(calls) if name in CALLS} == set(CALLS) - {"wait_ready", "generate", "resume"}


@either
@pytest.mark.parametrize("name", CALLS)
def test_a_closed_client_says_so(service: FakeService, connect: Connect, name: str) -> None:
    said = f"^the client of {service.address} is closed; make a new one$"
    with connect(service.address) as client:
        client.close()
        client.close()
        with pytest.raises(errors.ClientClosed, match=said):
            # A call that yields its progress begins with the first step.
            next(iter(CALLS[name](client)))
    assert not service.requests


@either
@pytest.mark.parametrize("resume", [False, True])
def test_closing_a_client_ends_its_streams_with_that_error(
    service: FakeService, connect: Connect, resume: bool
) -> None:
    service.behaviour = fake_service.endless
    with connect(service.address) as client:
        stream = client.generate("a", resume=resume)
        assert next(stream).text == "R"
        client.close()
        with pytest.raises(errors.ClientClosed):
            next(stream)
        stream.close()


CHILD = """
import multiprocessing, os, signal, sys, traceback
from tandem_client import Client, errors
from tests.client.test_closed import CALLS

address, how = sys.argv[1:]

def tried(call):
    try:
        call()
    except errors.ClientForked as error:
        made = f"the client of {address} was made in process {os.getppid()}, and this is its child {os.getpid()}; "
        assert error.message == f"{made}make a new client after the fork", error
        return
    raise AssertionError("no error")

def child():
    signal.alarm(60)
    for call in CALLS.values():
        tried(lambda: next(iter(call(client))))
    tried(lambda: next(stream))
    stream.close()
    client.close()
    with Client(address) as own:
        print("child", own.health(), len(list(own.generate("a"))), flush=True)

client = Client(address)
stream = client.generate("a")
next(stream)
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
# The parent's connection is whole.
assert [delta.text for delta in stream] == ["turn"]
print("parent", client.health())
"""


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_child_is_told_that_the_client_is_its_parents(service: FakeService, how: str) -> None:
    """Without it, a stream that the parent opened hangs in the child, and both would use one connection."""
    command = [sys.executable, "-c", CHILD, service.address, how]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "child True 2\nparent True\n"), done.stderr


async def test_a_client_of_a_loop_is_told_too(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the process alone is another one here: gRPC itself may crash in a child of such a process."""

    async def begun(call: Callable[[Any], Any], client: AsyncClient) -> None:
        made = call(client)
        await (anext(made) if hasattr(made, "__aiter__") else made)

    unused, client = AsyncClient(service.address), AsyncClient(service.address)
    stream = client.generate("a")
    assert (await anext(stream)).text == "Ré"
    own, child = os.getpid(), os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    for call in CALLS.values():
        with pytest.raises(errors.ClientForked, match=f"was made in process {own}, and this is its child {child};"):
            await begun(call, client)
    with pytest.raises(errors.ClientForked, match="make a new client after the fork"):
        await anext(stream)
    stream.close()
    await client.close()
    said = f"process {child} is a child of {own}, which used an AsyncClient before the fork, and gRPC does not work"
    with pytest.raises(errors.ClientForked, match=said):
        await unused.health()
    with pytest.raises(errors.ClientForked, match=said):
        Client(service.address)
    monkeypatch.undo()
    # Nothing of it touched the parent's connection.
    assert [delta.text async for delta in stream] == ["turn"]
    await client.close()
