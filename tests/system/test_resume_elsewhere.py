"""`Client.resume` with the real service: another process continues a stream where the first one left it."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from tandem_client import AsyncClient, Client
from tandem_client.errors import InvalidArgument, NotFound, Replaced
from tandem_client.types import Accepted, SampleOffset
from tests.rigs.processes import Rig, child_environment
from tests.system.asks import Ask, random_asks
from tests.system.featured import keywords

SHAPE = ("--max-rows", "16", "--max-length", "600", "--num-pages", "1200", "--step-ms", "4")
# Begins a stream, tells id, secret and offsets, and dies as a gateway might.
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


def two_samples(seed: int) -> Ask:
    [ask] = random_asks(1, seed=seed, prompts=(5, 30), outputs=(120, 130))
    return replace(ask, num_samples=2, ignore_eos=True)


def test_another_process_continues_the_stream_of_a_dead_one(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, scheduler_flags=("--frontends", "2"))
    ask = two_samples(seed=41)
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


def test_a_second_reader_replaces_the_first_and_wrong_arguments_find_nothing(rig: Rig) -> None:
    # The stream still runs when a busy machine has answered four calls.
    scheduler, _, caller = rig.serve(*SHAPE, "--step-ms", "20")
    ask = two_samples(seed=42)

    async def read_whole(accepted: Accepted) -> list[list[int]]:
        async with AsyncClient(scheduler.address) as client:
            stream = client.resume(accepted.request_id, accepted.resume_secret)
            async for _ in stream:
                pass
            return [sample.token_ids for sample in stream.samples]

    with Client(scheduler.address) as client:
        first = client.generate(ask.prompt, linger_seconds=600.0, **keywords(ask))
        next(first)
        accepted = first.accepted
        assert accepted is not None
        for request_id, secret in (("unknown", accepted.resume_secret), (accepted.request_id, bytes(32))):
            with pytest.raises(NotFound):
                next(client.resume(request_id, secret))
        # Neither of them was a reader, so the first one still reads.
        next(first)
        with pytest.raises(InvalidArgument, match="the request's number of samples") as caught:
            next(client.resume(accepted.request_id, accepted.resume_secret, offsets=[SampleOffset()] * 3))
        assert caught.value.keyword == "offsets"
        with pytest.raises(Replaced):
            list(first)
        assert asyncio.run(read_whole(accepted)) == [ask.expected(idx).tokens for idx in range(2)]
    caller.wait_idle()
