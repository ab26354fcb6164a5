"""The benchmarks' arithmetic on figures with known results, and a run of the whole."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer

from tests.measure.result import EngineResult
from tests.measure.serving import bars, roofline, tandem_engine
from tests.measure.workload import (
    MODEL,
    PAGE_SIZE,
    Workload,
    long_prompts,
    mixed_lengths,
    one_request,
    tokenizer_json,
)


def result(engine: str, seconds: float, tokens: list[list[int]], times: list[list[float]]) -> EngineResult:
    return EngineResult(
        engine=engine,
        note="",
        seconds=seconds,
        tokens=tokens,
        times=times,
        peak_mb={"scheduler": 100.0, "front end": 150.0},
        engine_cpu_seconds=seconds / 2,
        outside_cpu_seconds={"scheduler": 0.001},
    )


TWO = [[1, 2, 3], [4, 5]]
TIMES = [[1.0, 1.5, 1.75], [2.0, 2.5]]


def test_figures_of_one_run_follow_their_definitions() -> None:
    figures = result("tandem", 2.5, TWO, TIMES).figures()
    assert figures["output_tokens"] == 5
    assert figures["tokens_per_second"] == 2.0
    assert figures["tokens_per_engine_cpu_second"] == 4.0
    assert figures["ttft_ms"]["p50"] == 1500.0
    assert figures["itl_ms"]["p50"] == 500.0
    assert figures["outside_cpu_us_per_token"] == {"scheduler": pytest.approx(200.0)}


def test_the_time_to_first_token_counts_from_the_request_itself() -> None:
    run = dataclasses.replace(result("tandem", 2.5, TWO, TIMES), submitted=[0.0, 1.5])
    assert run.figures()["ttft_ms"]["p50"] == 750.0


@pytest.mark.parametrize("counts", [[0, 0], [0, 1]])
def test_a_worker_that_was_given_up_beside_busy_loops_misses_the_bar(counts: list[int]) -> None:
    runs = [
        dataclasses.replace(result("tandem", 1.0, TWO, TIMES), details={"workers_given_up": count}) for count in counts
    ]
    bar = bars.healthy_workers(runs, 4)
    assert (bar.name, bar.value) == ("workers given up beside 4 busy loops", sum(counts))
    assert bar.is_met == (sum(counts) == 0)


def test_different_tokens_are_reported_by_request_and_position() -> None:
    load = Workload(prompts=[[7], [8, 9]], output_lengths=[3, 2])
    first = result("tandem", 1.0, TWO, TIMES)
    other = result("static", 1.0, [[1, 2, 3], [4, 6]], TIMES)
    assert bars.differences(load, {"tandem": [first, first]}) == []
    runs = {"tandem": [first], "static": [other]}
    [found] = bars.differences(load, runs)
    assert str(found) == "request 1: tandem and static differ from token 1 of 2"
    assert bars.cases([found, found]) == [([8, 9, 4], 5, 6)]
    [equal] = bars.equal_tokens(runs, [found])
    assert (equal["equal"], equal["of"], equal["differences"]) == (1, 2, [str(found)])
    assert not bars.near_ties([{"margin": 2e-3, "below_best": 0.0}]).is_met
    assert bars.near_ties([{"margin": 9e-4, "below_best": 0.0}]).is_met


def test_limits_are_compared_with_wall_time() -> None:
    runs = {"tandem": [result("tandem", 1.0, TWO, TIMES)]}
    names = ["output tokens/s, tandem / static", "scheduler and front end together, MB"]
    for seconds, is_met in ((3.19, False), (3.21, True)):
        runs["static"] = [result("static", seconds, TWO, TIMES)]
        found = list(bars.comparisons(1, 1, runs))
        assert [(bar.name, bar.is_met) for bar in found] == list(zip(names, (is_met, True), strict=True))
        speed, roofline = bars.aims(1, 1, runs, [{"tokens_per_second": 10.0}])
        assert speed["aim"] == "output tokens/s, tandem / static: 4" and not speed["reached"]
        assert roofline == {"aim": "share of the roofline: 0.7", "value": 0.5, "reached": False}


def test_the_worker_alone_takes_the_time_of_the_replayed_steps() -> None:
    recorded = [(0.0, 0.1), (1.1, 2.0), (2.5, 3.0)]
    found = tandem_engine.alone(recorded, [(10.0, 10.1), (10.1, 11.0), (11.0, 11.55)], 1.0, 2.0)
    # The first step is the short round's.
    assert found["worker_alone_seconds"] == pytest.approx(1.45)
    assert found["service_per_worker_alone"] == pytest.approx(0.725)
    pauses = tandem_engine.pauses(recorded, 1.0, 2.0)
    assert pauses["in_steps_seconds"] == pytest.approx(1.4)
    assert pauses["between_steps_us"] == pytest.approx(0.5e6)
    assert pauses["before_first_step_ms"] == pytest.approx(100.0)
    assert pauses["after_last_step_ms"] == pytest.approx(0.0)


def test_the_roofline_counts_every_token_once() -> None:
    load = mixed_lengths()
    steps = list(roofline.decode_steps(load))
    assert sum(map(len, steps)) == load.num_output_tokens - len(load.prompts)
    assert max(map(len, steps)) == load.concurrent
    assert list(roofline.decode_steps(Workload(prompts=[[1] * 5], output_lengths=[3]))) == [[6], [7]]


def test_the_roofline_is_the_slower_of_reading_and_multiplying() -> None:
    load = one_request()
    weights = roofline.num_layer_weights() + roofline.num_head_weights()
    fast = 1e30
    _, decode = roofline.limit_seconds(load, roofline.Rates(bandwidth=1.0, prefill=fast, decode=fast))
    contexts = sum(range(129, 129 + 255))
    assert decode == 4.0 * weights * 255 + 2 * 8 * 4 * 64 * 4 * contexts
    _, decode = roofline.limit_seconds(load, roofline.Rates(bandwidth=fast, prefill=fast, decode=1.0))
    assert decode == pytest.approx(2.0 * weights * 255 + 4 * 8 * 8 * 64 * contexts)
    prefill, _ = roofline.limit_seconds(load, roofline.Rates(bandwidth=fast, prefill=1.0, decode=fast))
    body, head = roofline.num_layer_weights(), roofline.num_head_weights()
    assert prefill == pytest.approx(2.0 * body * 128 + 2 * 8 * 8 * 64 * 128**2 + 2 * head)


def test_the_workloads_equal_the_quoted_ones() -> None:
    workload = mixed_lengths()
    assert len(workload.prompts) == len(workload.output_lengths) == 64
    assert (sum(map(len, workload.prompts)), workload.num_output_tokens) == (9913, 8947)
    assert workload.max_length == 512
    long, one = long_prompts(), one_request()
    assert (len(long.prompts), {*map(len, long.prompts)}, {*long.output_lengths}) == (64, {1024}, {64})
    assert (list(map(len, one.prompts)), one.output_lengths) == ([128], [256])


def test_no_prompt_shares_its_first_page_with_another_or_with_the_short_round() -> None:
    for load in (mixed_lengths(), long_prompts(), one_request()):
        pages = [tuple(prompt[:PAGE_SIZE]) for prompt in (*load.prompts, *load.short_prompts)]
        assert len(set(pages)) == len(pages)


def test_a_shorter_stream_has_the_first_requests_of_the_same_callers() -> None:
    load = long_prompts()
    short = load.first_requests(24)
    assert (short.prompts, short.output_lengths) == (load.prompts[:24], [64] * 24)
    assert (short.concurrent, short.is_closed, short.max_length) == (8, True, load.max_length)
    for count in (0, 65):
        with pytest.raises(ValueError, match=f"{count} requests of a workload of 64"):
            load.first_requests(count)


def test_the_random_tokenizer_has_a_text_for_every_token() -> None:
    text = tokenizer_json(MODEL["vocab_size"], 3)
    tokenizer = Tokenizer.from_str(text.decode())
    assert tokenizer.get_vocab_size() == MODEL["vocab_size"] == len(json.loads(text)["model"]["vocab"])
    assert tokenizer.decode([72, 105, 300]) == "Hi abs"
