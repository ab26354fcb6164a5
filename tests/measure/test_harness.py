"""The harness of measurements: turns, spreads, bars, what is printed, and the comparison of two checkouts."""

import json
from pathlib import Path

import pytest

from tests.measure import against, call
from tests.measure.harness import Bar, Measurement, in_ms, in_turns, rows, spread
from tests.rigs.processes import Child
from tests.rigs.waiting import TIMEOUT_SECONDS


def test_sides_take_turns_in_both_orders_and_warm_rounds_do_not_count() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_turns(2, {"a": lambda: side("a"), "b": lambda: side("b")}, warm=1)
    assert "".join(calls) == "baabba"
    assert found == {"a": [3, 6], "b": [4, 5]}


def test_spreads_and_percentiles() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "least": 1.0, "most": 10.0}
    assert in_ms([0.001, 0.003], (0, 50, 100)) == {"p0": 1.0, "p50": 2.0, "p100": 3.0}
    assert in_ms([]) == {}


@pytest.mark.parametrize(
    ("value", "limit", "is_floor", "is_met"),
    [(1.0, 1.0, False, True), (1.1, 1.0, False, False), (1.0, 1.0, True, True), (0.9, 1.0, True, False)],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_missed_bar_is_the_exit_code(
    value: float, limit: float, is_floor: bool, is_met: bool, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    measurement = Measurement("any")
    measurement.begin(["--json"] if as_json else [])
    measurement.bar(Bar(name="first", value=0, limit=0), Bar(name="it", value=value, limit=limit, is_floor=is_floor))
    measurement.bar(Bar(name="last", value=0, limit=0))
    assert measurement.exit_code == (0 if is_met else 1)
    printed = capsys.readouterr().out.splitlines()[2]
    sign = "at least" if is_floor else "at most"
    if as_json:
        assert json.loads(printed) == {"bar": f"it: {sign} 1", "value": value, "met": is_met}
    else:
        assert printed == f"it: {sign} 1; {value:.4g}, {'met' if is_met else 'MISSED'}"


def test_figures_are_printed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"part": "fast", "streams": 2, "gap_ms": {"p50": 1.25}, "times": {"a": {"median": 1.0}}}
    measurement = Measurement("any")
    measurement.begin(["--json"])
    measurement.note("for people")
    measurement.line(line, text="for people")
    assert [json.loads(each) for each in capsys.readouterr().out.splitlines()][1:] == [line]
    title, *cells = rows(line)
    assert title == "\nfast"
    assert [cell.split() for cell in cells] == [
        ["streams:", "2"],
        ["gap", "ms:", "p50", "1.25"],
        ["times:"],
        ["a:", "median", "1"],
    ]


def test_a_table_names_its_columns_where_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    measurement = Measurement("any")
    measurement.begin([])
    table = [{"rows": 1, "step_us": 2.5}, {"rows": 20, "step_us": 3.5}, {"dtype": "float32"}]
    for line in table:
        measurement.row(line)
    shown = capsys.readouterr().out.splitlines()[1:]
    assert [line.split() for line in shown if line] == [
        ["rows", "step", "us"], ["1", "2.5"], ["20", "3.5"], ["dtype"], ["float32"],
    ]  # fmt: skip
    assert len({len(line) for line in shown[1:4]}) == 1


def test_a_function_is_called_in_a_process_of_its_own() -> None:
    child = Child("in_ms", call.words("harness.in_ms", seconds=[0.001, 0.003], which=[50, 100]))
    assert call.answer(child, TIMEOUT_SECONDS) == {"p50": 2.0, "p100": 3.0}
    assert child.wait() == 0


def test_figures_of_two_checkouts_are_compared_beside_a_control() -> None:
    printed = "\n".join(
        json.dumps(each)
        for each in (
            {"machine": {"load_1min": 9.0}},
            {"load": "greedy", "rows": 4, "spread": {"p10": 1.5}, "met": True, "rounds": [1, 2]},
            {"load": "greedy", "rows": 8, "spread": {"p10": 2.5}},
            {"load": "greedy", "step_us": 3},
            {"load": "greedy", "step_us": 4},
            "no mapping",
        )
    )
    assert against.figures(f"a warning\n{printed}") == {
        "greedy, 4 rows: spread.p10": 1.5,
        "greedy, 8 rows: spread.p10": 2.5,
        "greedy: step_us": 3.0,
        "greedy: step_us'": 4.0,
    }
    before, after, control = ([{"x": 10.0 + i, "y": 1.0, "gone": 0.0} for i in range(2)] for _ in range(3))
    for one in after:
        one["x"] *= 2
    control[0]["y"] = 1.25
    x, y = against.compared(before, after, control)
    assert (x["figure"], x["before"], x["after"], x["ratio"]["median"], x["stands_out"]) == ("x", 10.5, 21.0, 2.0, True)
    assert (y["ratio"]["median"], y["control"]["most"], y["stands_out"]) == (1.0, 1.25, False)


def test_a_checkout_is_measured_with_its_own_code_and_stubs(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    for empty in (folder.parent / "__init__.py", folder / "__init__.py", folder / "machine.py"):
        empty.touch()
    (tmp_path / "protos").mkdir()
    stub = "pathlib.Path('.stubs/own_stub.py').write_text('x = 3')"
    (tmp_path / "protos" / "build_hook.py").write_text(f"import pathlib\npathlib.Path('.stubs').mkdir()\n{stub}\n")
    (folder / "own.py").write_text(
        "import sys\nfrom own_stub import x\nprint(f'{{\"x\": {x}}}')\nsys.exit(int(sys.argv[2]))\n"
    )
    assert against.run(tmp_path, "own", ["1"]) == {"x": 3.0}
    with pytest.raises(against.subprocess.CalledProcessError):
        against.run(tmp_path, "own", ["2"])
    with pytest.raises(against.subprocess.CalledProcessError):
        against.run(tmp_path, "unknown", [])
