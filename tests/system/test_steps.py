"""--steps with real processes: the file agrees with the service's load, also after a worker's death."""

import csv
from pathlib import Path

from scheduler_svc.recording.steps_file import HEADER
from tandem_client.plot.data import read_steps, summarize
from tests.rigs.processes import Rig
from tests.system.asks import answer, random_asks, send

SHAPE = ("--num-pages", "60", "--max-rows", "8", "--max-length", "300")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_steps_file_agrees_with_the_load(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    scheduler, worker, caller = rig.serve(*SHAPE, scheduler_flags=("--steps", str(path)))
    streams = send(caller, random_asks(16, seed=21, prompts=(1, 90), outputs=(30, 90)))
    streams[0].wait_tokens(10)
    worker.kill()
    rig.worker(*SHAPE)
    streams.check()
    load = caller.wait_idle()
    assert scheduler.terminate() == 0
    rows = rows_of(path)
    assert list(rows[0]) == HEADER.strip().split(",")
    steps = [row for row in rows if row["kind"] not in ("reset", "joined")]
    assert [int(row["step"]) for row in steps] == list(range(1, load.steps + 1))
    assert {row["kind"] for row in steps} == {"prefill", "decode", "mixed"}
    assert sum(int(row["output_tokens"]) for row in steps) == load.output_tokens
    assert int(steps[-1]["preemptions"]) == load.preemptions
    assert [(row["kind"], row["cause"]) for row in rows if row not in steps] == [
        ("joined", ""),
        ("reset", "worker lost"),
        ("joined", ""),
    ]
    assert all(int(row["tokens"]) == int(row["prefill_tokens"]) + int(row["decode_tokens"]) for row in rows)
    assert all(0 < int(row["pages_used"]) <= int(row["pages_total"]) == 59 for row in steps)
    assert all(0 < int(row["running"]) <= 8 for row in steps)
    assert all(float(row["ms"]) <= float(row["span_ms"]) + 1 for row in steps)
    for name in ("running", "pages_used", "pages_cached", "pages_total"):
        assert all(row[f"all_{name}"] == row[name] for row in rows if row["kind"] != "reset")
    assert [row["workers"] for row in rows if row not in steps] == ["1", "0", "1"]
    at = [float(row["at_seconds"]) for row in rows]
    assert at == sorted(at)


def test_a_line_has_its_lane_s_figures_and_the_service_s_totals(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    # Both workers are busy until a busy machine has seen it.
    shape = (*SHAPE, "--identity", "one model", "--step-ms", "10")
    scheduler, _, caller = rig.serve(*shape, scheduler_flags=("--steps", str(path)))
    second = rig.worker("--num-pages", "40", *shape[2:])
    caller.wait_load(lambda load: load.workers == 2)
    streams = send(caller, random_asks(12, seed=23, prompts=(1, 60), outputs=(40, 90)))
    for stream in streams[:2]:
        stream.wait_tokens(10)
    caller.wait_load(lambda load: all(worker.running for worker in load.per_worker))
    second.kill()
    streams.check()
    steps = caller.wait_idle().steps
    assert scheduler.terminate() == 0
    rows = rows_of(path)
    assert [(row["kind"], row["lane"]) for row in rows if row["kind"] in ("joined", "reset")] == [
        ("joined", "1"),
        ("joined", "2"),
        ("reset", "2"),
    ]
    assert {(row["lane"], row["pages_total"]) for row in rows} == {("1", "59"), ("2", "39")}
    assert all(int(row["pages_used"]) + int(row["pages_cached"]) <= int(row["pages_total"]) for row in rows)
    assert {(row["workers"], row["all_pages_total"]) for row in rows} == {("1", "59"), ("2", "98")}
    assert any(int(row["all_running"]) > int(row["running"]) > 0 for row in rows)
    assert [int(row["step"]) for row in rows if row["kind"] not in ("reset", "joined")] == list(range(1, steps + 1))
    summary = summarize(read_steps(path))
    assert (summary.num_workers, [lane.name for lane in summary.lanes]) == (2, ["lane 1", "lane 2"])


def test_a_killed_service_leaves_whole_lines(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    scheduler, _, caller = rig.serve(*SHAPE, scheduler_flags=("--steps", str(path)))
    ask = random_asks(1, seed=22, prompts=(5, 9), outputs=(90, 90))[0]
    answer(caller, ask)
    load = caller.wait_idle()
    # The idle service writes its lines without another step.
    size = 0
    while len(rows_of(path)) < load.steps + 1:
        size = path.stat().st_size
        caller.load()
    scheduler.kill()
    assert path.stat().st_size >= size
    assert path.read_text().endswith("\n")
    assert [int(row["step"]) for row in rows_of(path)][-1] == load.steps


def test_an_existing_file_is_refused_by_name(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("another file")
    scheduler = rig.launch_scheduler("--steps", str(path))
    scheduler.killed = True
    assert scheduler.wait() == 2
    scheduler.wait_line(f"steps: {path} cannot be created: File exists")
    assert path.read_text() == "another file"
