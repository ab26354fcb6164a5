"""The demo: its counts, its comparison of two rounds, and its error if a process ends."""

import asyncio
import io
import re

import grpc
import pytest
from rich.console import Console
from tandem.v1 import inference_pb2

from tandem_client import AsyncClient
from tandem_client.demo.__main__ import Services, Teller, one_line, play, result_table, round_line
from tandem_client.demo.rounds import Completion, Round, asked, differing
from tandem_client.errors import Internal
from tandem_client.services.settings import SCHEDULER
from tandem_contract.processes import ServiceEnded
from tests.client import fake_service
from tests.client.fake_programs import SETTINGS
from tests.client.fake_service import Ending, FakeService


def completion(*token_ids: int, ended_by: str = "length") -> Completion:
    return Completion(
        prompt="Return the", options={}, token_ids=list(token_ids), text=" text", ended_by=ended_by,
        first_token_seconds=0.5, decode_seconds=2.0, first_tokens=1,
    )  # fmt: skip


def a_round(*completions: Completion) -> Round:
    return Round(completions=list(completions), seconds=2.0, steps=9, pages_used=3, pages_total=10, lane_resets=1)


def test_rounds_are_equal_token_for_token() -> None:
    one = a_round(completion(1, 2), completion(3), completion(4, 5))
    assert differing(one, one) == []
    assert differing(one, a_round(completion(1, 2), completion(4), completion(4, 5, 6))) == [1, 2]
    assert differing(one, a_round(completion(1, 2), completion(3, ended_by="eos"), completion(4, 5))) == [1]


def test_rates_count_the_tokens_after_the_first_delta() -> None:
    assert completion(1, 2, 3).tokens_per_second == 1.0
    assert completion(1).tokens_per_second is None


def test_one_prompt_is_sampled_with_a_seed_and_the_others_are_greedy() -> None:
    questions = asked(16)
    assert len({question.prompt for question in questions}) == 8
    assert sum("seed" in question.options for question in questions) == 1
    assert all(question.options["max_new_tokens"] == 16 for question in questions)


async def test_a_round_collects_and_prints_its_streams(service: FakeService) -> None:
    console, played = Console(width=160, record=True, file=io.StringIO()), Round(completions=asked(8))
    async with AsyncClient(service.address) as client:
        await asyncio.gather(play(client, Teller(console), played), played.wait_for(8 * 3))
    assert played.num_tokens == 8 * 3
    assert {one.text for one in played.completions} == {"Réturn"}
    line = "round 1: 8 completions, 24 tokens in .* steps, at most 0 of 0 pages used"
    assert re.match(line, round_line("round 1", played))
    console.print(result_table(played, played, [2]))
    assert console.export_text().count("yes") == 7


async def test_a_round_ends_with_its_first_failure(service: FakeService) -> None:
    def one_fails(request: inference_pb2.GenerateRequest, ending: Ending) -> fake_service.Messages:
        fails = fake_service.refusing(grpc.StatusCode.INTERNAL, "broken")
        return (fails if request.sampling.HasField("seed") else fake_service.endless)(request, ending)

    service.behaviour = one_fails
    async with AsyncClient(service.address) as client:
        with pytest.raises(Internal, match="broken"):
            await play(client, Teller(Console(file=io.StringIO())), Round(completions=asked(8)))
        assert await asyncio.to_thread(lambda: all(ending.wait() for ending in service.endings))


async def test_tokens_wake_a_waiting_task() -> None:
    playing = Round(completions=asked(8))

    async def come(*token_ids: int) -> None:
        async with playing._arrived:
            playing.completions[0].token_ids += token_ids
            playing._arrived.notify_all()

    waiting = asyncio.create_task(playing.wait_for(3))
    await come(1, 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    await come(3)
    await waiting
    assert playing.num_tokens == 3


def test_one_line_replaces_line_breaks_with_blanks() -> None:
    assert one_line(" a\n  b ") == " a b"
    assert one_line("") == ""


async def test_a_child_process_that_ends_raises_an_error_with_its_last_line() -> None:
    console = Console(width=1000, record=True, file=io.StringIO())
    # Neither program starts with this flag.
    wrong = ["--no-such-flag"]
    services = Services(Teller(console), scheduler_flags=wrong, worker_flags=wrong, settings=SETTINGS[SCHEDULER])
    try:
        with pytest.raises(ServiceEnded, match=r"ended with exit code 2: .*no-such-flag"):
            await services.start()
    finally:
        await services.stop()
    assert "no-such-flag" in console.export_text()
