"""Samples, penalties, biases, allowed and banned tokens, logprobs of outputs and prompts: same seed, same output.

Alone, batched, preempted and after worker deaths, every token and logprob must equal the oracle's. The checking
worker's samples depend on every setting, so a lost or mixed-up setting shows.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from tandem_client import Client
from tandem_client.types import AbortOutcome, FinishReason
from tests.rigs.processes import Rig
from tests.system.asks import Ask
from tests.system.conftest import Served
from tests.system.featured import Reading, random_featured

SHAPE = ("--num-pages=1024", "--max-rows=32", "--max-length=1024", "--token-budget=128", "--page-size=16")


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.scheduler.address) as client:
        yield client


def assert_all_kinds(asks: list[Ask]) -> None:
    """Asserts that the random choice covers every field."""
    plain = Ask(prompt=(), max_new_tokens=0)
    for name in Ask.__slots__:
        if name not in ("priority", "request_id", "include_stop", "extra", "lark"):
            assert any(getattr(ask, name) != getattr(plain, name) for ask in asks), name
    assert {ask.num_samples for ask in asks} == {1, 2, 3, 4}


def test_sequential_requests_equal_the_oracle(client: Client) -> None:
    for ask in random_featured(8, seed=1, prompts=(1, 80), outputs=(1, 40)):
        Reading(client, [ask]).check()


def test_batched_requests_equal_the_oracle_cold_and_cached(client: Client) -> None:
    asks = random_featured(40, seed=2, prompts=(1, 120), outputs=(1, 60))
    assert_all_kinds(asks)
    Reading(client, asks).check()
    Reading(client, asks[::-1]).check()
    assert client.load().workers == 1


def test_the_first_of_several_samples_equals_a_single_sample(client: Client) -> None:
    asks = [ask for ask in random_featured(20, seed=3, prompts=(1, 60), outputs=(20, 30)) if ask.num_samples > 1]
    together, alone = Reading(client, asks), Reading(client, [replace(ask, num_samples=1) for ask in asks])
    together.check()
    alone.check()
    for several, one in zip(together.streams, alone.streams, strict=True):
        assert several.samples[0].token_ids == one.samples[0].token_ids
        assert several.samples[0].logprobs == one.samples[0].logprobs
    # The noise is keyed by the sample's index, so sampled outputs differ.
    drawn = [s.samples for s, ask in zip(together.streams, asks, strict=True) if ask.temperature]
    assert any(samples[0].token_ids != samples[1].token_ids for samples in drawn)


def test_prompt_logprobs_of_a_cached_prompt_equal_the_oracle(client: Client) -> None:
    prompt = tuple(range(97, 97 + 20)) * 6
    plain = Ask(prompt=prompt, max_new_tokens=4)
    Reading(client, [plain]).check()
    for start in (0, 1, 15, 16, 17, 64, 118, 119):
        Reading(client, [replace(plain, prompt_logprobs_start=start, logprobs=3), plain]).check()


def test_preempted_requests_equal_the_oracle(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(
        "--num-pages", "20", "--max-rows", "12", "--max-length", "256", "--page-size", "16"
    )
    with Client(scheduler.address) as client:
        asks = random_featured(24, seed=4, prompts=(1, 100), outputs=(40, 80))
        assert_all_kinds(asks)
        reading = Reading(client, asks)
        reading.check()
        load = caller.wait_idle()
    assert (load.preemptions > 10, load.lane_resets) == (True, 0)
    gave_way = [stream.summary for stream in reading.streams if stream.summary and stream.summary.timing.preemptions]
    assert sum(summary.timing.preemptions for summary in gave_way) == load.preemptions
    assert any(summary.usage.recomputed_tokens for summary in gave_way)


@pytest.mark.parametrize("num_kills", [5, pytest.param(15, marks=pytest.mark.long)])
def test_repeated_worker_kills_change_no_output(rig: Rig, num_kills: int) -> None:
    rng = random.Random(5)
    workers = [rig.worker(*SHAPE)]
    record = rig.runtime_dir / "record.bin"
    scheduler = rig.scheduler("--record", str(record))
    caller = rig.ready_caller(scheduler)
    workers += [rig.worker(*SHAPE), rig.worker(*SHAPE)]
    length = 130 + 20 * num_kills
    asks = iter(random_featured(100, seed=5, prompts=(1, 200), outputs=(length - 40, length)))
    with Client(scheduler.address) as client:
        reading = Reading(client, islice(asks, 14))
        for number in range(num_kills):
            # Early kills hit prompts in computation, before their logprobs are delivered.
            if number > 3:
                reading.wait_more(rng.randrange(1, 300))
            # A request that a kill meets alone at the same token again is at fault, as far as the service can know.
            caller.wait_load(lambda load, may_suspect=number < 2: load.running and (may_suspect or not load.suspects))
            time.sleep(rng.random() * 0.01)
            # Enough streams must still run that every kill hits some.
            reading.start(islice(asks, max(0, 6 - len(reading.running))))
            assert len(reading.running) >= 4, "too few requests were prepared"
            rig.kill_serving(caller, workers)
            workers.append(rig.worker(*SHAPE))
        met_all = [stream for stream in reading.streams[:14] if stream in reading.running]
        reading.check()
        load = caller.wait_idle()
    assert load.lane_resets >= num_kills
    met = [stream.summary.timing.worker_changes for stream in reading.streams if stream.summary]
    assert sum(met) >= num_kills, met
    often = [stream for stream in met_all if stream.summary and stream.summary.timing.worker_changes >= num_kills // 3]
    assert len(often) >= min(4, len(met_all)), met
    assert scheduler.terminate() == 0
    rig.check_record(record)


def test_abort_ends_every_sample(client: Client) -> None:
    stream = client.generate(
        [97], request_id="many", num_samples=4, logprobs=2, max_new_tokens=480, ignore_eos=True, temperature=0.5
    )
    next(stream)
    assert client.abort("many") == {"many": AbortOutcome.ABORTED}
    for _ in stream:
        pass
    assert [sample.finished and sample.finished.reason for sample in stream.samples] == [FinishReason.ABORTED] * 4
    assert stream.summary is not None
    assert stream.summary.usage.output_tokens == sum(len(sample.token_ids) for sample in stream.samples)


def test_a_disconnect_frees_every_sample(served: Served, client: Client) -> None:
    stream = client.generate([97], num_samples=4, logprobs=2, max_new_tokens=480, ignore_eos=True)
    next(stream)
    stream.close()
    served.caller.wait_idle()
