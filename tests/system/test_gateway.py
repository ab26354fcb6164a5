"""The gateway before the whole service: lost workers, clients that leave, greedy keys, and public addresses."""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tandem_client import Client
from tandem_client.types import AbortOutcome
from tests.rigs.door import Door, token_file
from tests.rigs.processes import Child, Rig
from tests.system.conftest import Served

SHAPE = ("--num-pages", "2048", "--max-rows", "64", "--max-length", "512", "--token-budget", "512", "--page-size", "16")
NUM_STREAMS, NEW_TOKENS = 16, 80


@contextmanager
def gateway(rig: Rig, address: str, *flags: str) -> Iterator[tuple[Child, str]]:
    """A gateway of the rig's service. Yields its process and its URL.

    It waits for headers as long as callers may be kept from running: some open hundreds of connections at once.
    """
    patient = ("--head-seconds", "60", *flags)
    child = rig.start("gateway", "tandem_client.gateway", "--listen", "127.0.0.1:0", "--address", address, *patient)
    yield child, child.wait_line(r"gateway listening on (http\S+)$").group(1)
    assert child.terminate() == 0, child.output()


async def _texts(url: str, started: threading.Event) -> list[str]:
    """Streams all prompts at once. Sets `started` when a quarter of the tokens is there."""
    due = NUM_STREAMS * NEW_TOKENS // 4

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:

        async def one(i: int) -> str:
            nonlocal due
            ids = list[int]()
            stream = await client.completions.create(
                model="", prompt=[i + 3, 4, 5], max_tokens=NEW_TOKENS, seed=i, temperature=0.8, stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            async for chunk in stream:
                found = chunk.choices[0].model_dump().get("token_ids") or []
                ids += found
                due -= len(found)
                if due <= 0:
                    started.set()
            assert len(ids) == NEW_TOKENS
            return json.dumps(ids)

        return list(await asyncio.gather(*(one(i) for i in range(NUM_STREAMS))))


def test_a_killed_worker_changes_no_stream(rig: Rig) -> None:
    # It hangs in the middle of its streams, so they run when it is killed.
    lost = rig.worker(*SHAPE, "--hang-step", "40")
    scheduler = rig.scheduler()
    caller = rig.ready_caller(scheduler)
    rig.worker(*SHAPE)
    with gateway(rig, scheduler.address) as (_, url):
        started, result = threading.Event(), list[list[str]]()
        reading = threading.Thread(target=lambda: result.append(asyncio.run(_texts(url, started))))
        reading.start()
        assert started.wait(120)
        assert caller.load().running > 0
        lost.kill()
        reading.join(120)
        assert caller.wait_idle().lane_resets >= 1
        undisturbed = asyncio.run(_texts(url, threading.Event()))
        assert result == [undisturbed]


def test_a_client_that_leaves_frees_its_request(rig: Rig) -> None:
    """The service stops long before the last of the request's steps. `make bench-gateway` measures the time."""
    scheduler, _, caller = rig.serve("--step-ms", "20", *SHAPE, late=False)
    with gateway(rig, scheduler.address) as (_, url), httpx.Client(base_url=url) as client:
        for stream in (True, False, True, False):
            body = {"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True, "stream": stream}
            before = caller.load().steps
            if stream:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    # An iterator that is dropped closes the stream.
                    pieces = answer.iter_raw()
                    next(pieces)
                    caller.wait_load(lambda load: load.running == 1)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=0.3)
            assert caller.wait_load(lambda load: load.running == 0).steps - before < 400


def test_a_greedy_key_does_not_keep_others_waiting(tmp_path: Path) -> None:
    """One key sends 60 requests at once, again and again; the other one's requests succeed, one after the other."""
    polite, greedy = "tandem_polite", "tandem_greedy"
    tokens = token_file(tmp_path, {"polite": polite, "greedy": greedy})
    with Rig() as rig:
        rig.worker("--step-ms", "5", *SHAPE, "--max-rows", "16", late=False)
        scheduler = rig.scheduler("--tokens", str(tokens), "--max-waiting", "16")
        with gateway(rig, scheduler.address, "--max-requests", "256") as (_, url):
            waits = asyncio.run(_beside_greedy(url, polite, greedy))
    # A tenant that takes all it can leaves half of the rows, so the other one waits for steps, not for requests; 16 of
    # them would have to end before its own in one queue, each after 400 steps.
    assert median(waits) < 100, waits


async def _beside_greedy(url: str, polite: str, greedy: str) -> list[int]:
    """Returns the steps from each request of the polite key to its first token."""
    body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "stream": True}
    long: dict[str, Any] = {**body, "max_tokens": 400, "return_token_ids": True}
    refused, steps, stepping = asyncio.Event(), 0, asyncio.Event()

    async def first_token(client: httpx.AsyncClient) -> int:
        before, found = steps, None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                assert '"error"' not in line
                if found is None and line.startswith("data:"):
                    found = steps - before
        assert found is not None
        return found

    async def count(client: httpx.AsyncClient) -> None:
        """Counts steps by the tokens of a stream that the greedy key has from the beginning."""
        nonlocal steps
        while True:
            async with client.stream("POST", "/v1/completions", json=long) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        steps += len(json.loads(line[6:])["choices"][0].get("token_ids") or [])
                        stepping.set()

    async def take(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post("/v1/completions", json={**long, "stream": False})
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 429:
                refused.set()

    def client_of(key: str) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60, limits=limits
        )  # fmt: skip

    async with client_of(polite) as mine, client_of(greedy) as theirs:
        answer = await mine.get("/v1/models")
        while answer.status_code == 503 or (await mine.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)
            answer = await mine.get("/v1/models")
        taking = [asyncio.create_task(count(theirs))]
        await stepping.wait()
        taking += [asyncio.create_task(take(theirs)) for _ in range(60)]
        await refused.wait()
        waits = [await first_token(mine) for _ in range(7)]
        ended = [task for task in taking if task.done()]
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)
    for task in ended:
        task.result()
    return waits


def test_a_public_gateway_serves_only_with_a_service_that_asks_for_tokens(tmp_path: Path) -> None:
    door = Door(tmp_path, rights=("inference",))
    tls = door.service_flags[:2]
    with Rig() as rig:
        rig.worker(*SHAPE)
        open_door = rig.scheduler()
        with public(rig, open_door.address, *tls) as url, trusting(door, url) as client:
            answer = client.get("/v1/models")
            assert answer.status_code == 503 and "asks for no tokens" in answer.text
            assert client.get("/livez").status_code == 200
    with Rig() as rig:
        rig.worker(*SHAPE)
        scheduler = rig.scheduler(*door.service_flags, "--health-listen", "127.0.0.1:0")
        health = scheduler.wait_line(r"health listening on (\S+)").group(1)
        flags = (*tls, "--service-ca", str(door.authority), "--health-address", health)
        with public(rig, scheduler.address, *flags) as url, trusting(door, url) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.05)
            assert client.get("/v1/models").json()["data"][0]["id"]
            answer = client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
            refused = client.get("/v1/models", headers={"authorization": "Bearer tandem_wrong"})
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert door.token not in "".join(child.output() for child in rig.children)


@contextmanager
def public(rig: Rig, address: str, *flags: str) -> Iterator[str]:
    """A gateway that listens on all addresses. Yields its URL on the loopback one."""
    with gateway(rig, address, "--listen", "0.0.0.0:0", *flags) as (_, url):
        yield url.replace("0.0.0.0", "127.0.0.1")


@contextmanager
def trusting(door: Door, url: str) -> Iterator[httpx.Client]:
    context, headers = ssl.create_default_context(cafile=door.authority), {"authorization": f"Bearer {door.token}"}
    with httpx.Client(base_url=url, verify=context, headers=headers, timeout=30) as client:
        yield client


def test_the_id_of_an_answer_finds_its_request_while_it_runs(served: Served) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 400, "ignore_eos": True, "stream": True}
    address = served.scheduler.address
    with gateway(served.rig, address) as (_, url), httpx.Client(base_url=url) as http, Client(address) as client:
        for form in (str, str.upper):
            with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as answer:
                lines = answer.iter_lines()
                given = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])["id"]
                assert given.startswith("cmpl-mine-")
                [entry] = client.all_requests(id_prefix=given)
                assert (f"cmpl-{entry.request_id}", entry.state, entry.max_new_tokens) == (given, "running", 400)
                assert client.abort(form(given)) == {form(given): AbortOutcome.ABORTED}
                list(lines)
            assert list(client.all_requests(states=["waiting", "running"])) == []
            assert client.abort(given).details == {
                given: f"no waiting or running request has the id {given!r} or {given.removeprefix('cmpl-')!r}"
            }
