"""The experiments run at a small size, their figures are consistent, and the arithmetic of a verdict is right."""

import json

import numpy as np
import pytest

from scheduler_svc.core.schedule import admit, placement, policy
from tests.measure.policies import __main__ as command
from tests.measure.policies.constants import SWEEPS, sweep
from tests.measure.policies.experiments import EXPERIMENTS
from tests.measure.policies.fairness import jain_index, max_min_shares
from tests.measure.policies.rivals import Placement, placed
from tests.measure.policies.scenario import Experiment, Judged, Scenario, Variant
from tests.measure.policies.summary import gain, verdict
from tests.measure.policies.trial import constants, run

_LENGTHS = "--input uniform:16:64 --output uniform:8:64 --max-new-tokens 64 --page-size 16 --chunk-align 16"
SMALL = Scenario(
    name="small",
    words="a few requests",
    flags=f"{_LENGTHS} --max-rows 8 --num-pages 30 --concurrency 12 --token-budget 64 --tenants 3 --greedy-share 0.7",
    requests=60,
)


def test_the_figures_of_a_run_are_consistent() -> None:
    found = {each: run(SMALL, Variant(name=each, flags=f"--admission {each}"), 1) for each in ("known", "horizon")}
    # Every request got its tokens once, preempted or not.
    assert found["known"]["served_tokens"] == found["horizon"]["served_tokens"]
    assert found["known"]["preemptions"] > found["horizon"]["preemptions"]
    assert (found["known"]["recomputed"] > 0) is (found["known"]["preemptions"] > 0)
    for figures in found.values():
        assert figures["rejected"] == 0
        assert 0 < figures["page_use"] <= 1
        assert 1 / 3 <= figures["jain"] <= 1 + 1e-9
        assert figures["ttft_p50"] <= figures["ttft_p99"]
        assert 0 <= figures["recomputed"] < 1
        assert figures["window_seconds"] > 0


def test_the_seed_decides_the_figures() -> None:
    plain = Variant(name="plain")
    assert run(SMALL, plain, 1) == run(SMALL, plain, 1) != run(SMALL, plain, 2)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_is_judged_where_it_runs(name: str) -> None:
    experiment = EXPERIMENTS[name]
    names = [each.name for each in experiment.scenarios]
    assert len(set(names)) == len(names)
    assert {each.scenario for each in experiment.judged} <= set(names)
    assert len(experiment.variants) > 1


@pytest.mark.parametrize("name", list(SWEEPS))
def test_a_sweep_starts_from_the_value_of_the_core(name: str) -> None:
    first, *others = sweep(name).variants
    with constants(first.constants):
        pass
    assert all(first.constants != other.constants for other in others)


def test_constants_change_in_every_importing_module_and_are_restored() -> None:
    before = policy.MAX_PASSED_OVER
    with constants({"MAX_PASSED_OVER": 3}):
        assert (policy.MAX_PASSED_OVER, admit.MAX_PASSED_OVER) == (3, 3)
    assert (before, before) == (policy.MAX_PASSED_OVER, admit.MAX_PASSED_OVER)
    with pytest.raises(ValueError, match="no constant NOTHING"), constants({"NOTHING": 1}):
        pass


def test_every_placement_serves_all_requests() -> None:
    original = placement.Placement.starts_elsewhere
    with placed(Placement.ROUND_ROBIN):
        assert placement.Placement.starts_elsewhere is not original
    assert placement.Placement.starts_elsewhere is original
    two = Scenario(name="two", words="", flags=SMALL.flags + " --workers 2", requests=40)
    found = {each: run(two, Variant(name=each, change=lambda each=each: placed(each)), 1) for each in Placement}
    assert len({figures["served_tokens"] for figures in found.values()}) == 1


def test_the_command_prints_tables_and_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment(
        name="tiny",
        claim="one thing beats another",
        scenarios=(SMALL,),
        variants=(Variant(name="one"), Variant(name="other", flags="--no-mixed-steps")),
        judged=(Judged(scenario="small", figure="itl_p99", is_cost=True),),
    )
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    assert command.main(["--only", "tiny", "--quick", "--requests", "30"]) == 0
    out = capsys.readouterr().out
    assert "tiny: one thing beats another" in out
    assert "one against other" in out
    assert command.main(["--only", "tiny", "--json", "--seeds", "2", "--requests", "30"]) == 0
    _, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("variant") for line in lines] == ["one", "other", None]
    assert len(lines[0]["seeds"]) == 2
    ratio = lines[0]["seeds"][0]["itl_p99"] / lines[1]["seeds"][0]["itl_p99"]
    assert 1 - ratio == pytest.approx(lines[2]["gains"][0]["least"]) or 1 - ratio == pytest.approx(
        lines[2]["gains"][0]["most"]
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "is_cost", "middle"),
    [([2.0, 3.0, 4.0], [4.0, 4.0, 4.0], True, 0.25), ([2.0, 3.0, 5.0], [4.0, 4.0, 4.0], False, -0.25)],
)
def test_a_gain_is_the_median_of_pairs(ours: list[float], theirs: list[float], is_cost: bool, middle: float) -> None:
    judged = Judged(scenario="s", figure="f", is_cost=is_cost)
    found = gain(judged, [{"f": each} for each in ours], "rival", [{"f": each} for each in theirs])
    assert found.middle == pytest.approx(middle)
    assert found.least <= found.middle <= found.most


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ((1.1, 1.2), "gains:"),
        ((1.1, 0.9), "gains and loses:"),
        ((1.04, 0.99), "gains nothing:"),
        ((0.9, 1.0), "loses:"),
    ],
)
def test_a_gain_of_five_percent_decides_the_verdict(ours: tuple[float, float], word: str) -> None:
    scenarios = tuple(Scenario(name=name, words="", flags="", requests=1) for name in ("a", "b"))
    experiment = Experiment(
        name="e",
        claim="",
        scenarios=scenarios,
        variants=(Variant(name="ours"), Variant(name="theirs")),
        judged=tuple(Judged(scenario=name, figure="tokens_per_second", is_cost=False) for name in ("a", "b")),
    )
    runs = {(s.name, "ours"): [{"tokens_per_second": value}] for s, value in zip(scenarios, ours, strict=True)}
    runs |= {(s.name, "theirs"): [{"tokens_per_second": 1.0}] for s in scenarios}
    assert verdict(experiment, runs).startswith(f"ours against theirs {word}")


def test_fairness_equals_an_example_by_hand() -> None:
    asked = np.array([100.0, 10.0, 10.0, 0.0])
    assert max_min_shares(asked, 50.0).tolist() == [30.0, 10.0, 10.0, 0.0]
    assert jain_index(np.array([30.0, 10.0, 10.0, 0.0]), asked) == pytest.approx(1.0)
    # One queue serves each tenant in proportion to its requests: 5/12 of them.
    parts = np.array([100, 10, 10]) * 5 / 12 / np.array([30, 10, 10])
    expected = parts.sum() ** 2 / (3 * (parts**2).sum())
    assert jain_index(asked * 5 / 12, asked) == pytest.approx(expected)
    assert jain_index(np.array([50.0, 0.0, 0.0, 0.0]), asked) == pytest.approx(1 / 3)
