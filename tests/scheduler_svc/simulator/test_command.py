"""The command line of `tandem simulate`: what it prints and what it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.messages.config import Admission, Policy
from scheduler_svc.simulator import options
from scheduler_svc.simulator.__main__ import main
from scheduler_svc.simulator.traces import write_trace

SMALL = ["--requests", "60", "--rate", "20", "--input", "uniform:10:200", "--output", "uniform:1:30"]


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def figures(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    (line,) = printed(capsys, *argv, "--json").splitlines()
    return json.loads(line)


def test_the_table_has_every_figure_and_the_last_line_the_main_ones(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *SMALL).splitlines()
    labels = [line.split("  ")[0] for line in lines]
    for label in ("TTFT", "ITL", "queue", "total", "requests", "throughput", "pages", "hit rate", "waste"):
        assert label in labels
    assert lines[-1].startswith("tandem simulate: llama-3.1-8b on h100: 60 requests of uniform:10:200 in")
    assert lines[-1].endswith("seed 0") and "TTFT p50" in lines[-1]


def test_two_equal_runs_print_equal_json(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (figures(capsys, *SMALL, "--workers", "2") for _ in range(2))
    assert first == second
    assert first["requests"] == {"submitted": 60, "finished": 60, "rejected": 0}
    assert first["ends"] == {"eos": 60}
    for name in ("ttft_seconds", "itl_seconds"):
        values = first[name]
        assert 0 < values["p50"] <= values["p90"] <= values["p99"] <= values["max"]
    assert len(first["timeline"]) > 2


def test_machine_and_model_decide_the_latency(capsys: pytest.CaptureFixture[str]) -> None:
    h200, l4 = (figures(capsys, *SMALL, "--machine", machine) for machine in ("h200", "l4"))
    assert l4["itl_seconds"]["p50"] > 5 * h200["itl_seconds"]["p50"]
    small = figures(capsys, *SMALL, "--machine", "l4", "--model", "smollm2-135m")
    assert small["itl_seconds"]["p50"] < l4["itl_seconds"]["p50"] / 10


def test_policy_switches_reach_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    heavy = ["--requests", "80", "--rate", "1000", "--input", "2000", "--output", "40", "--max-new-tokens", "0"]
    mixed, apart = (figures(capsys, *heavy, flag) for flag in ("--mixed-steps", "--no-mixed-steps"))
    assert mixed["itl_seconds"] != apart["itl_seconds"]


def test_every_policy_of_the_core_is_a_switch_that_can_be_compared() -> None:
    names = {field.name.replace("_", "-") for field in dataclasses.fields(Policy)}
    assert names | {"prefix-sharing", "spread"} == set(options.COMPARABLE)
    chosen = options.read(["--no-cache-aware", "--admission", "known", "--compare", "fair-share"])
    assert chosen.policy == Policy(cache_aware=False, admission=Admission.KNOWN)
    assert [variant.policy.fair_share for _, variant in chosen.variants()] == [True, False]


def test_requests_of_a_trace_share_its_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    assert main(["--write-trace", str(path), "--requests", "60", "--seed", "3"]) == 0
    run = ("--trace", str(path), "--rate", "4")
    shared, alone = figures(capsys, *run), figures(capsys, *run, "--no-prefix-sharing")
    assert shared["hit_rate"] > 0.1 and alone["hit_rate"] == 0
    assert shared["ttft_seconds"]["mean"] < alone["ttft_seconds"]["mean"]
    first = figures(capsys, *run, "--requests", "20", "--concurrency", "2")
    assert first["requests"]["submitted"] == 20 and first["what"].endswith("with 2 at once")


def test_a_steps_file_can_be_fitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    run = ["--requests", "150", "--rate", "8", "--input", "uniform:10:4000", "--output", "uniform:1:60"]
    machine = figures(capsys, *run, "--steps", str(path))
    assert len(path.read_text().splitlines()) == machine["steps"] + 2  # header, the worker that joined
    capsys.readouterr()
    assert main([*run, "--fit", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert "fitted to" in captured.err and "R2 0.9" in captured.err
    fitted = json.loads(captured.out)
    assert fitted["what"].startswith("fitted: ")
    assert fitted["pages"]["total"] == machine["pages"]["total"]
    for name in ("ttft_seconds", "itl_seconds", "total_seconds"):
        assert fitted[name]["mean"] == pytest.approx(machine[name]["mean"], rel=0.2)


def test_find_rate_prints_the_highest_rate_that_meets_the_goal(capsys: pytest.CaptureFixture[str]) -> None:
    goal = ["--find-rate", "--ttft-p99", "0.3"]
    run = ["--requests", "100", "--input", "1000", "--output", "4", "--rate", "20"]
    found = figures(capsys, *run, *goal)
    assert 0 < found["rate"] < found["fails_at"] <= 1.05 * found["rate"]
    assert figures(capsys, *run[:-1], str(found["rate"]))["ttft_seconds"]["p99"] <= 0.3 * 1.005
    lines = printed(capsys, *run, *goal, "--probes", "3").splitlines()
    assert len([line for line in lines if "requests/s  " in line]) == 3
    assert "TTFT p99 under 300 ms" in lines[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--machine", "abacus"], "--machine is 'abacus'; it must be one of b200, h200, h100"),
        (["--model", "eliza"], "--model is 'eliza'; it must be one of llama-3.1-8b"),
        (["--model", "llama-3.1-70b"], "weights of 141.1 GB leave no page in 90% of 80 GB; --ranks 2"),
        (["--ranks", "3"], "--ranks is 3; it must divide the 32 attention heads of llama-3.1-8b, such as 4"),
        (["--ranks=2", "--fit=nowhere.csv"], "--ranks is 2; with --fit the steps of the file are those of a whole"),
        (["--compare", "spread"], "--compare spread needs several services: --cells is 1"),
        (["--find-rate"], "--find-rate needs --ttft-p99 SECONDS, and --ttft-p99 needs --find-rate"),
        (["--ttft-p99", "1"], "--find-rate needs --ttft-p99 SECONDS, and --ttft-p99 needs --find-rate"),
        (["--find-rate", "--ttft-p99", "1", "--concurrency", "3"], "cannot be combined with --concurrency or --steps"),
        (["--token-budget", "300"], "--token-budget is 300; --max-rows 256 and one chunk of 128 need 384"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["--fit", "nowhere.csv"], "nowhere.csv: No such file or directory"),
        (["--rate", "0"], "--rate is 0; it must be a number from 1e-06 to 1e+09"),
        (["--rate", "nan"], "--rate is nan; it must be a number"),
        (["--workers", "65"], "--workers is 65; it must be a whole number from 1 to 64"),
        (["--input", "few"], "--input is 'few'; it must be N, uniform:LEAST:MOST"),
        (["--admission", "none"], "--admission is 'none'; it must be one of horizon, watermark, known"),
        (["--compare", "seeds"], "--compare is 'seeds'; it must be one of mixed-steps, admission"),
        (["--request", "5"], "there is no flag --request; did you mean --requests?"),
        (["--prefix-groups", "1000000"], "the prefixes have 1024000000 tokens; the limit is "),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.out == ""


def test_a_page_size_must_divide_the_blocks_of_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(path, requests=5)
    assert main(["--trace", str(path), "--page-size", "96"]) == 2
    assert "--page-size is 96; it must divide 512, the tokens of a block of the trace" in capsys.readouterr().err
    assert main(["--trace", str(path), "--page-size", "96", "--no-prefix-sharing"]) == 0


def test_the_memory_command_compares_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--memory", "paged", "--help"])
    assert ended.value.code == 0
    assert "--sequences" in capsys.readouterr().out


def test_compare_prints_the_variants_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--prefix-groups", "1", "--prefix-tokens", "512", "--tenants", "3"]
    lines = printed(capsys, *SMALL, *shared, "--compare", "prefix-sharing").splitlines()
    assert lines[0].split() == ["prefix-sharing", "no", "prefix-sharing"]
    hits = next(line for line in lines if line.startswith("hit rate")).split()
    assert hits[3] == "0.0%" and hits[4] == "-100%"
    assert any(line.startswith("other TTFT p99") for line in lines)
    runs = printed(capsys, *SMALL, "--compare", "admission", "--json").splitlines()
    assert [json.loads(line)["variant"] for line in runs] == ["horizon", "watermark", "known"]
    assert json.loads(runs[0])["ttft_seconds"] == figures(capsys, *SMALL)["ttft_seconds"]


def test_requests_that_arrive_at_once_have_no_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00.009930+00:00,9,3\n" * 4)
    assert printed(capsys, "--trace", str(path), "--rate", "5").splitlines()[-1].count("trace.csv all at once") == 1
    assert main(["--trace", str(path), "--find-rate", "--ttft-p99", "1"]) == 2
    assert "all requests of the trace arrive at once" in capsys.readouterr().err


def test_requests_longer_than_the_context_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    refused = figures(capsys, "--requests", "3", "--rate", "1", "--input", "9000", "--model", "gemma-2-2b")
    assert refused["ends"] == {"rejected: invalid": 3} and refused["seconds"] == 0
    assert "3 rejected: invalid" in printed(capsys, "--requests", "3", "--input", "9000", "--model", "gemma-2-2b")
