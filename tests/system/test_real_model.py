"""The service computes what Transformers computes: greedy tokens of the bundled model in float32.

Every completion crosses four page boundaries. The tests share one service and run in this order; each can run alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tandem_client.sync_client import GenerateStream
from tandem_client.types import TokenLogprob
from tandem_client.wire.request import GenerateOptions
from tests.system.real_service import (
    MAX_ROWS,
    NEW_TOKENS,
    NUM_PROMPTS,
    PAGE_SIZE,
    SMALL_PAGES,
    TIMEOUT_SECONDS,
    Case,
    Output,
    RealService,
    bundled_cases,
    real_service,
)

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")


@pytest.fixture(scope="module")
def served() -> Iterator[RealService]:
    with real_service() as service:
        # The small worker compiles its kernels while the first tests run.
        service.start_small()
        yield service


def different(cases: Sequence[Case], outputs: Sequence[Output]) -> list[str]:
    """One line per completion that differs from the reference: the first different token and the smallest logit gap."""
    lines = []
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_tokens == len(case.prompt_ids)
        if output.tokens != case.tokens:
            pairs = zip(output.tokens, case.tokens, strict=False)
            at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(output.tokens))
            lines.append(f"{case.text!r}: token {at} of {len(output.tokens)}, smallest margin {case.margin:.2g}")
    return lines


def assert_equal(cases: Sequence[Case], outputs: Sequence[Output]) -> None:
    assert different(cases, outputs) == []


def test_the_reference_outputs_are_long_and_varied() -> None:
    cases = bundled_cases()
    assert len(cases) == NUM_PROMPTS == 32
    assert all(len(case.tokens) == NEW_TOKENS == 64 for case in cases)
    assert len({tuple(case.tokens) for case in cases}) >= NUM_PROMPTS * 3 // 4
    lengths = [len(case.prompt_ids) for case in cases]
    assert min((length + NEW_TOKENS - 2) // PAGE_SIZE - (length - 1) // PAGE_SIZE for length in lengths) >= 3
    assert len({length % PAGE_SIZE for length in lengths}) >= PAGE_SIZE // 2


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.long)])
def test_sequential_requests_equal_the_reference(served: RealService, every: int) -> None:
    cases = bundled_cases()[::every]
    outputs = [served.read([case]).result()[0] for case in cases]
    assert_equal(cases, outputs)


@pytest.mark.parametrize("order", ["forward", pytest.param("reverse", marks=pytest.mark.long)])
def test_batched_requests_equal_the_reference(served: RealService, order: str) -> None:
    cases = bundled_cases() if order == "forward" else bundled_cases()[::-1]
    before = served.client.load()
    reading = served.read(cases)
    assert_equal(cases, reading.result())
    after = served.client.load()
    assert len(cases) > MAX_ROWS
    assert after.steps - before.steps < len(cases) * NEW_TOKENS // 4, "the requests did not run in batches"
    if after.workers == 1 and after.worker_pid == served.roomy.pid:
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


def sampled(served: RealService, numbers: Sequence[int], *, num_samples: int) -> list[GenerateStream]:
    """Starts the streams of these cases together and reads them to the end; a case's number is its seed."""
    options: GenerateOptions = {**SAMPLED, "num_samples": num_samples}
    streams = [
        served.client.generate(bundled_cases()[number].prompt_ids, seed=number, timeout=TIMEOUT_SECONDS, **options)
        for number in numbers
    ]
    for stream in streams:
        for _ in stream:
            pass
    return streams


def all_logprobs(logprobs: Sequence[TokenLogprob]) -> list[float]:
    return [value for one in logprobs for value in (one.logprob, *(logprob for _, logprob in one.top))]


def test_sampled_text_and_logprobs_agree_alone_and_batched(served: RealService) -> None:
    numbers = range(6)
    alone = [sampled(served, [number], num_samples=1)[0] for number in numbers]
    batched = sampled(served, numbers, num_samples=2)
    for one, several in zip(alone, batched, strict=True):
        assert several.samples[0].token_ids == one.samples[0].token_ids
        assert all_logprobs(several.samples[0].logprobs) == pytest.approx(
            all_logprobs(one.samples[0].logprobs), abs=1e-4
        )
    for case, stream in zip(bundled_cases()[: len(numbers)], batched, strict=True):
        first, second = stream.samples
        assert first.token_ids != second.token_ids
        assert stream.prompt_info is not None
        assert (stream.prompt_info.start, len(stream.prompt_info.logprobs)) == (1, len(case.prompt_ids) - 1)
        for entry in (*first.logprobs, *second.logprobs, *stream.prompt_info.logprobs):
            best = [logprob for _, logprob in entry.top]
            assert best == sorted(best, reverse=True)
            assert entry.logprob <= best[0] <= 0


def test_a_worker_kill_changes_no_greedy_token(served: RealService) -> None:
    cases = bundled_cases()[::2]
    served.start_small().wait_line("joined", TIMEOUT_SECONDS)
    reading = served.read(cases)
    received = reading.wait_tokens(MAX_ROWS * NEW_TOKENS // 2)
    served.small_serves_alone()
    outputs = reading.result()
    for before, output in zip(received, outputs, strict=True):
        assert output.tokens[: len(before)] == before
    interrupted = [output for output in outputs if output.summary and output.summary.timing.worker_changes]
    diverged = different(cases, outputs)
    print(f"{len(interrupted)} streams met the kill, {len(diverged)} of {len(cases)} diverged after it: {diverged}")
    assert len(interrupted) >= MAX_ROWS // 4
    assert diverged == []


@pytest.mark.parametrize("order", ["forward", pytest.param("reverse", marks=pytest.mark.long)])
def test_a_pool_too_small_for_its_rows_changes_no_greedy_token(served: RealService, order: str) -> None:
    served.small_serves_alone()
    cases = bundled_cases() if order == "forward" else bundled_cases()[::-1]
    before = served.client.load()
    outputs = served.read(cases).result()
    assert_equal(cases, outputs)
    after = served.client.load()
    assert after.preemptions > before.preemptions
    preempted = [output for output in outputs if output.summary and output.summary.timing.preemptions]
    assert any(output.summary and output.summary.usage.recomputed_tokens for output in preempted)


def test_a_worker_without_a_compiler_serves_the_references_tokens(tmp_path: Path) -> None:
    """As on a machine that has Python and nothing else; nothing is compiled, and one line says what that costs."""
    cases = bundled_cases()[::8]
    bare = {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    with real_service(num_pages=SMALL_PAGES, environment=bare) as service:
        assert_equal(cases, service.read(cases).result())
        lines = list(service.roomy.lines)
    warnings = [line for line in lines if "WARNING" in line]
    assert len(warnings) == 1, warnings
    assert "more slowly" in warnings[0]
    assert "apt install g++" in warnings[0]
    assert not [line for line in lines if "compiling" in line]
    assert not [path for name in ("inductor", "native") for path in tmp_path.glob(f"tandem/{name}/*")]
