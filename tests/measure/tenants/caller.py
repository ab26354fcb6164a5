"""One tenant's client, in a process of its own.

`polite` sends one request after the other, with a pause between them. `greedy` keeps a number of requests live until
its process is ended; a refused one is sent again after a pause. All of `refused` are refused and sent again at once.
"""

import asyncio
import random
import time
from typing import Any

import grpc
import grpc.aio
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tandem_client import AsyncClient
from tandem_client.errors import QueueFull, Unavailable

PROMPT_TOKENS = 32
POLITE_NEW_TOKENS, GREEDY_NEW_TOKENS = 8, 64
PAUSE_SECONDS = 0.02
TIMEOUT_SECONDS = 300.0


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 200) for _ in range(PROMPT_TOKENS)]


async def polite(address: str, token: str, count: int) -> dict[str, Any]:
    """Returns the seconds from the first try of each request to its first token, and the number of refusals."""
    async with AsyncClient(address, token=token, max_retries=0) as client:
        await _ask(client, 3)  # the first calls are not measured
        return await _ask(client, count)


async def _ask(client: AsyncClient, count: int) -> dict[str, Any]:
    """Sends `count` requests. A refused one is sent again, and its time goes on."""
    rng, waits, refusals = random.Random(1), list[float](), 0
    for _ in range(count):
        begun, prompt, first = time.perf_counter(), _prompt(rng), 0.0
        while not first:
            try:
                async with client.generate(
                    prompt, timeout=TIMEOUT_SECONDS, max_new_tokens=POLITE_NEW_TOKENS, ignore_eos=True
                ) as stream:
                    async for delta in stream:
                        if not first and delta.token_ids:
                            first = time.perf_counter()
            except (QueueFull, Unavailable):
                refusals += 1
                await asyncio.sleep(PAUSE_SECONDS)
        waits.append(first - begun)
        await asyncio.sleep(PAUSE_SECONDS * (1 + rng.random()))
    return {"waits": waits, "refusals": refusals}


async def greedy(address: str, token: str, live: int, *, priority: int = 0, new_salts: bool = False) -> None:
    """Keeps `live` requests at the service, for ever. `new_salts`: each has a salt of its own."""
    rng = random.Random(2)

    async def send(client: AsyncClient) -> None:
        while True:
            salt = str(rng.random()) if new_salts else ""
            try:
                async with client.generate(
                    _prompt(rng), max_new_tokens=GREEDY_NEW_TOKENS, ignore_eos=True, priority=priority, cache_salt=salt
                ) as stream:
                    async for _ in stream:
                        pass
            except (QueueFull, Unavailable):
                await asyncio.sleep(0.2 + 0.2 * rng.random())

    async with AsyncClient(address, token=token, max_retries=0) as client:
        await asyncio.gather(*(send(client) for _ in range(live)))


async def refused(address: str, token: str, live: int, why: str) -> None:
    """Keeps `live` calls at the service that it refuses, for ever; each is sent again as soon as it was refused."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=_prompt(random.Random(3))))
    if why == "priority":
        request.priority = -5
    elif why == "model":
        request.model = "another"
    proof = "tandem_wrong" if why == "token" else token
    async with grpc.aio.insecure_channel(address) as channel:
        inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        control: Any = control_pb2_grpc.ControlServiceStub(channel)

        async def send() -> None:
            while True:
                metadata = (("authorization", f"Bearer {proof}"),)
                if why == "right":
                    code = await control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata).code()
                else:
                    code = await inference.Generate(request, metadata=metadata).code()
                assert code is not grpc.StatusCode.OK

        await asyncio.gather(*(send() for _ in range(live)))
