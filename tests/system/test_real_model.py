"""The service says what Transformers says: greedy tokens of the bundled model, f32, through every layer of it.

Page edges are crossed four times by every completion. The tests share one service and run in this order; each can run
without those before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tandem_client.request import GenerateOptions
from tandem_client.sync_stream import GenerateStream
from tandem_client.types import TokenLogprob
from tests.rigs.processes import Rig
from tests.system.real_service import (
    BUNDLED,
    MAX_ROWS,
    NEW_TOKENS,
    NUM_PROMPTS,
    PAGE_SIZE,
    PATIENCE_SECONDS,
    Case,
    Output,
    RealService,
    cases_of,
    prompts,
    reference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    service: RealService
    cases: list[Case]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    texts = prompts()
    with reference(BUNDLED / "model", texts, NEW_TOKENS) as process, Rig() as rig:
        service = RealService(rig)
        cases = cases_of(process, texts)
        # Compiles its kernels while the first tests run.
        service.start_small()
        yield Served(service=service, cases=cases)
        service.client.close()


def different(cases: Sequence[Case], outputs: Sequence[Output]) -> list[str]:
    """One line for each completion that is not the reference's: where it leaves it, and how close the choice was."""
    lines = []
    for case, output in zip(cases, outputs, strict=True):
        if output.tokens != case.tokens:
            pairs = zip(output.tokens, case.tokens, strict=False)
            at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(output.tokens))
            lines.append(f"{case.text!r}: token {at} of {len(output.tokens)}, least margin {case.margin:.2g}")
    return lines


def assert_equal(cases: Sequence[Case], outputs: Sequence[Output]) -> None:
    assert different(cases, outputs) == []


def test_the_reference_is_worth_comparing_with(served: Served) -> None:
    cases = served.cases
    assert len(cases) == NUM_PROMPTS == 64
    assert all(len(case.tokens) == NEW_TOKENS == 64 for case in cases)
    assert len({tuple(case.tokens) for case in cases}) >= NUM_PROMPTS * 3 // 4
    lengths = [len(case.prompt_ids) for case in cases]
    assert min((length + NEW_TOKENS - 2) // PAGE_SIZE - (length - 1) // PAGE_SIZE for length in lengths) >= 3
    assert len({length % PAGE_SIZE for length in lengths}) >= PAGE_SIZE // 2


def test_alone_one_after_another(served: Served) -> None:
    cases = served.cases
    outputs = [served.service.read([case]).result()[0] for case in cases]
    assert_equal(cases, outputs)


@pytest.mark.parametrize("order", ["first round", "second round, the other way round"])
def test_in_mixed_batches_with_more_requests_than_rows(served: Served, order: str) -> None:
    cases = served.cases if order == "first round" else served.cases[::-1]
    before = served.service.client.load()
    reading = served.service.read(cases)
    assert_equal(cases, reading.result())
    after = served.service.client.load()
    assert len(cases) > MAX_ROWS
    assert after.steps - before.steps < len(cases) * NEW_TOKENS // 4, "they were to run in batches"
    if after.workers == 1 and after.worker_pid == served.service.roomy.pid:
        assert after.preemptions == before.preemptions


SAMPLED: GenerateOptions = {
    "temperature": 0.8,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "max_new_tokens": 32,
    "ignore_eos": True,
    "logprobs": 3,
    "prompt_logprobs_start": 0,
}


def sampled(served: Served, numbers: Sequence[int], *, num_samples: int) -> list[GenerateStream]:
    """These cases' streams, started together and read to their ends; a case's number is its seed."""
    options: GenerateOptions = {**SAMPLED, "num_samples": num_samples}
    streams = [
        served.service.client.generate(
            served.cases[number].prompt_ids, seed=number, timeout=PATIENCE_SECONDS, **options
        )
        for number in numbers
    ]
    for stream in streams:
        for _ in stream:
            pass
    return streams


def all_logprobs(logprobs: Sequence[TokenLogprob]) -> list[float]:
    return [value for one in logprobs for value in (one.logprob, *(logprob for _, logprob in one.top))]


def test_sampled_text_and_its_logprobs_alone_and_batched(served: Served) -> None:
    numbers = range(12)
    alone = [sampled(served, [number], num_samples=1)[0] for number in numbers]
    batched = sampled(served, numbers, num_samples=2)
    for one, several in zip(alone, batched, strict=True):
        assert several.samples[0].token_ids == one.samples[0].token_ids
        assert all_logprobs(several.samples[0].logprobs) == pytest.approx(
            all_logprobs(one.samples[0].logprobs), abs=1e-4
        )
    for case, stream in zip(served.cases[: len(numbers)], batched, strict=True):
        first, second = stream.samples
        assert first.token_ids != second.token_ids
        assert stream.prompt_info is not None
        assert (stream.prompt_info.start, len(stream.prompt_info.logprobs)) == (1, len(case.prompt_ids) - 1)
        for told in (*first.logprobs, *second.logprobs, *stream.prompt_info.logprobs):
            best = [logprob for _, logprob in told.top]
            assert best == sorted(best, reverse=True)
            assert told.logprob <= best[0] <= 0


def test_a_worker_killed_in_the_middle_changes_no_token(served: Served) -> None:
    service, cases = served.service, served.cases[::2]
    service.start_small().wait_line("joined", PATIENCE_SECONDS)
    reading = service.read(cases)
    heard = reading.wait_tokens(MAX_ROWS * NEW_TOKENS // 2)
    service.small_serves_alone()
    outputs = reading.result()
    for before, output in zip(heard, outputs, strict=True):
        assert output.tokens[: len(before)] == before
    interrupted = [output for output in outputs if output.summary and output.summary.timing.worker_changes]
    diverged = different(cases, outputs)
    print(f"{len(interrupted)} streams met the kill, {len(diverged)} of {len(cases)} diverged after it: {diverged}")
    assert len(interrupted) >= MAX_ROWS // 4
    assert diverged == []


@pytest.mark.parametrize("order", ["first round", "second round, the other way round"])
def test_with_a_pool_so_small_that_requests_give_way(served: Served, order: str) -> None:
    service = served.service
    service.small_serves_alone()
    cases = served.cases if order == "first round" else served.cases[::-1]
    before = service.client.load()
    outputs = service.read(cases).result()
    assert_equal(cases, outputs)
    after = service.client.load()
    assert after.preemptions > before.preemptions
    gave_way = [output for output in outputs if output.summary and output.summary.timing.preemptions]
    assert any(output.summary and output.summary.usage.recomputed_tokens for output in gave_way)
