"""Streams survive their front end and their connection, and nothing that was given up lives on."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import grpc
import pytest
from tandem.v1 import inference_pb2 as pb

from tandem_client import AsyncClient, Client
from tandem_client.types import SampleOffset
from tests.rigs.processes import Rig, SchedulerProcess, child_environment
from tests.rigs.streams import code_of
from tests.rigs.transcript import Transcript
from tests.rigs.waiting import LINGER_SECONDS, TIMEOUT_SECONDS
from tests.system.asks import Ask, random_asks
from tests.system.featured import Reading, keywords, random_featured

SHAPE = ("--max-rows", "16", "--max-length", "600", "--num-pages", "1200", "--step-ms", "4")
LINGER = pb.GenerateRequest(resume=pb.ResumeParams(linger_seconds=LINGER_SECONDS))
# Begins a stream, prints id, secret and offsets, and dies as a gateway might.
_FIRST_GATEWAY = """
import ast, os, signal, sys
from tandem_client import Client
options = ast.literal_eval(sys.argv[2])
stream = Client(sys.argv[1]).generate(options.pop("prompt"), linger_seconds=600.0, **options)
read = [[], []]
for delta in stream:
    read[delta.sample_idx].append((delta.text, delta.token_ids))
    if min(map(len, read)) >= 10:
        break_at = [(offset.token_ids, offset.text_chars) for offset in stream.offsets]
        print(repr((stream.accepted.request_id, stream.accepted.resume_secret, break_at, read)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def without_logprobs(asks: list[Ask]) -> list[Ask]:
    return [replace(ask, logprobs=None, prompt_logprobs_start=None) for ask in asks]


def kill_frontends(scheduler: SchedulerProcess) -> None:
    """Kills all front ends and waits until as many listen again."""
    for each in scheduler.frontends():
        number = len(scheduler.lines)
        each.kill()
        scheduler.wait_line("frontend listening on ", after=number)


def test_streams_survive_the_deaths_of_all_front_ends(rig: Rig) -> None:
    """Several samples, stop strings and penalties; every front end dies twice."""
    rig.worker(*SHAPE)
    scheduler = rig.scheduler("--frontends", "2")
    asks = without_logprobs(random_featured(16, seed=5, prompts=(1, 60), outputs=(60, 90)))
    with Client(scheduler.address) as client, Client(scheduler.address) as other:
        client.wait_ready(TIMEOUT_SECONDS)
        halves = [Reading(one, half, resume=True) for one, half in ((client, asks[:8]), (other, asks[8:]))]
        for _ in range(2):
            for half in halves:
                half.wait_more(40)
            kill_frontends(scheduler)
        for half in halves:
            half.check()
        assert client.load().lane_resets == 0
    rig.caller(scheduler).wait_idle()


def test_asynchronous_streams_survive_the_death_of_their_front_end(rig: Rig) -> None:
    scheduler, _, _ = rig.serve(*SHAPE)
    asks = random_asks(4, seed=6, prompts=(1, 30), outputs=(80, 100))

    async def read(client: AsyncClient, ask: Ask, has_begun: asyncio.Event) -> Transcript:
        transcript = Transcript()
        stream = client.generate(ask.prompt, resume=True, timeout=TIMEOUT_SECONDS, **keywords(ask))
        async for message in stream.messages():
            transcript.take(message)
            if len(stream.samples[0].token_ids) >= 5:
                has_begun.set()
        return transcript

    async def main() -> list[Transcript]:
        async with AsyncClient(scheduler.address) as client:
            begun = [asyncio.Event() for _ in asks]
            tasks = [asyncio.create_task(read(client, ask, event)) for ask, event in zip(asks, begun, strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))
            os.kill(scheduler.frontend_pid(), signal.SIGKILL)
            return await asyncio.gather(*tasks)

    for ask, transcript in zip(asks, asyncio.run(main()), strict=True):
        ask.check(transcript)


def test_a_second_reader_replaces_the_first_and_a_wrong_secret_finds_nothing(rig: Rig) -> None:
    _, _, caller = rig.serve(*SHAPE)
    [ask] = random_asks(1, seed=7, prompts=(5, 30), outputs=(120, 130))
    ask = replace(ask, extra=LINGER)
    stream = caller.generate(ask.request())
    transcript = stream.wait_tokens(10)
    assert transcript.accepted is not None
    request_id, secret = transcript.accepted.request_id, transcript.accepted.resume_secret

    def resume(**fields: object) -> list[pb.GenerateResponse]:
        return list(
            caller._inference.Resume(pb.ResumeRequest(**{"request_id": request_id, **fields}), timeout=TIMEOUT_SECONDS)
        )

    for wrong in ({"resume_secret": b""}, {"resume_secret": secret[:-1]}, {"request_id": "x", "resume_secret": secret}):
        with pytest.raises(grpc.RpcError) as caught:
            resume(**wrong)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        resume(resume_secret=secret, offsets=[pb.SampleOffset(token_ids=131)])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    # The wrong offset came with the right secret, so its call is a reader, too.
    assert code_of(stream.failed()) == grpc.StatusCode.ABORTED
    whole = Transcript()
    for message in resume(resume_secret=secret):
        whole.take(message)
    ask.check(whole)
    # The answer is kept, also for the caller that has all of it.
    counts = pb.SampleOffset(token_ids=len(whole.samples[0].tokens), text_chars=len(whole.samples[0].text))
    kinds = [message.WhichOneof("event") for message in resume(resume_secret=secret, offsets=[counts])]
    assert kinds == ["accepted", "finished", "summary"]
    caller.wait_idle()


def test_a_client_that_gives_up_aborts_and_one_that_is_lost_does_not(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE)
    [ask] = random_asks(1, seed=8, prompts=(5, 30), outputs=(400, 500))
    with Client(scheduler.address) as client:
        stream = client.generate(ask.prompt, resume=True, linger_seconds=LINGER_SECONDS, **keywords(ask))
        for delta in stream:
            if delta.token_offset > 3:
                break
        # `close` returned after the Abort, which ended the request.
        assert client.load().running == 0
    lost = caller.generate(replace(ask, extra=LINGER).request())
    lost.wait_tokens(3)
    lost.cancel()
    before = caller.load()
    caller.wait_load(lambda load: load.running == 1 and load.output_tokens > before.output_tokens + 5)
    assert caller.abort(lost.transcript.accepted.request_id)
    caller.wait_idle()


def test_a_lost_request_is_freed_when_its_linger_time_is_over(rig: Rig) -> None:
    # Half of the steps take longer than the request lingers.
    _, _, caller = rig.serve(*SHAPE, "--step-ms", "10")
    [ask] = random_asks(1, seed=9, prompts=(5, 30), outputs=(500, 560))
    extra = pb.GenerateRequest(resume=pb.ResumeParams(linger_seconds=0.3))
    lost = caller.generate(replace(ask, extra=extra).request())
    lost.wait_tokens(3)
    lost.cancel()
    assert caller.wait_idle().output_tokens < ask.max_new_tokens


def test_another_process_continues_the_stream_of_a_dead_one(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, scheduler_flags=("--frontends", "2"))
    [ask] = random_asks(1, seed=41, prompts=(5, 30), outputs=(120, 130))
    ask = replace(ask, num_samples=2)
    options = repr({"prompt": ask.prompt, **keywords(ask)})
    first = subprocess.run(
        [sys.executable, "-c", _FIRST_GATEWAY, scheduler.address, options],
        capture_output=True, text=True, env=child_environment(), check=False,
    )  # fmt: skip
    assert first.stdout, first.stderr
    request_id, secret, places, read = eval(first.stdout)
    offsets = [SampleOffset(token_ids=tokens, text_chars=chars) for tokens, chars in places]
    assert all(10 <= offset.token_ids < ask.max_new_tokens for offset in offsets)
    with Client(scheduler.address) as client:
        stream = client.resume(request_id, secret, offsets=offsets, linger_seconds=600.0)
        for delta in stream:
            read[delta.sample_idx].append((delta.text, delta.token_ids))
    for idx, pieces in enumerate(read):
        assert [token for _, tokens in pieces for token in tokens] == ask.expected(idx).tokens
        assert "".join(text for text, _ in pieces) == ask.expected(idx).text
    assert stream.offsets == tuple(
        SampleOffset(token_ids=len(ask.expected(idx).tokens), text_chars=len(ask.expected(idx).text))
        for idx in range(2)
    )
    caller.wait_idle()
