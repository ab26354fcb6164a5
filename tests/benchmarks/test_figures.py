"""The benchmarks' arithmetic on figures with known results, and a run of the whole."""

import json

import pytest
from tokenizers import Tokenizer

from tests.benchmarks.result import EngineResult, different_tokens
from tests.benchmarks.serving import comparisons
from tests.benchmarks.workload import MODEL, full, tokenizer_json


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


def test_different_tokens_are_reported_by_request_and_position() -> None:
    first = result("tandem", 1.0, TWO, TIMES)
    other = result("static", 1.0, [[1, 2, 3], [4, 6]], TIMES)
    assert different_tokens([first, first]) == []
    assert different_tokens([first, other]) == ["request 1: tandem and static differ from token 1 of 2"]


def test_limits_are_compared_with_wall_time() -> None:
    runs = {"tandem": [result("tandem", 1.0, TWO, TIMES)], "static": [result("static", 1.29, TWO, TIMES)]}
    by_name = {line["bar"]: line["met"] for line in comparisons(runs)}
    assert by_name == {
        "tandem / static at least 1.3": False,
        "scheduler and front end together under 300 MB": True,
        "identical tokens in all runs": True,
    }
    runs["static"] = [result("static", 1.31, TWO, TIMES)]
    assert comparisons(runs)[0]["met"]


def test_the_workload_equals_the_quoted_one() -> None:
    workload = full()
    assert len(workload.prompts) == len(workload.output_lengths) == 64
    assert (sum(map(len, workload.prompts)), workload.num_output_tokens) == (9913, 8947)
    assert workload.max_length == 512


def test_the_random_tokenizer_has_a_text_for_every_token() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json().decode())
    assert tokenizer.get_vocab_size() == MODEL["vocab_size"] == len(json.loads(tokenizer_json())["model"]["vocab"])
    assert tokenizer.decode([72, 105, 300]) == "Hi abs"
