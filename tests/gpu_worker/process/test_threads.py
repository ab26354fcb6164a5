"""The choice of threads: candidates of a machine, the choice from figures, and a measurement of real layers."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_worker.checkpoint.linear import PackedLinear
from gpu_worker.process import threads
from gpu_worker.process.machine import Cpus, usable_cpus
from gpu_worker.process.threads import Measured, best, candidates, choose_or_follow, choose_threads, default_threads
from gpu_worker.settings import WorkerSettings

NO_LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("cpus", "limit", "expected"),
    [
        (Cpus(logical=1, cores=1), NO_LIMIT, [1]),
        (Cpus(logical=2, cores=2), NO_LIMIT, [1, 2]),
        (Cpus(logical=12, cores=6), NO_LIMIT, [1, 2, 4, 5, 6]),
        (Cpus(logical=64, cores=64, quota=3.5), NO_LIMIT, [1, 2, 3]),
        (Cpus(logical=64, cores=64, quota=0.5), NO_LIMIT, [1]),
        (Cpus(logical=16, cores=16), 3, [1, 2, 3]),
    ],
)
def test_candidates_go_up_to_cores_quota_and_limit(cpus: Cpus, limit: int, expected: list[int]) -> None:
    assert candidates(cpus, limit) == expected


def scaled(counts: list[int], *, one_row: float, many_rows: float, memory_threads: int = 2) -> list[Measured]:
    """Figures in milliseconds of one thread; one row is as fast as memory, which `memory_threads` exhaust."""
    return [
        Measured(threads=n, one_row=one_row / 1e3 / min(n, memory_threads), many_rows=many_rows / 1e3 / n)
        for n in counts
    ]


def test_layers_that_take_long_get_every_core_and_short_ones_leave_one() -> None:
    two = Cpus(logical=2, cores=2)
    assert best(scaled([1, 2], one_row=5, many_rows=18), two) == 2
    assert best(scaled([1, 2], one_row=0.4, many_rows=2.6), two) == 1
    eight = Cpus(logical=8, cores=8)
    assert best(scaled([1, 2, 4, 7, 8], one_row=5, many_rows=18), eight) == 7
    assert best(scaled([1, 2, 4, 7, 8], one_row=500, many_rows=1800), eight) == 8


def test_siblings_or_a_quota_below_the_cpus_decide_whether_there_is_room() -> None:
    short = scaled([1, 2], one_row=0.4, many_rows=2.6)
    assert best(short, Cpus(logical=4, cores=2)) == 2
    assert best(short, Cpus(logical=4, cores=4, quota=3.0)) == 2
    assert best(short, Cpus(logical=4, cores=4, quota=2.0)) == 1


def test_threads_that_gain_nothing_are_not_used() -> None:
    busy = [Measured(threads=1, one_row=0.005, many_rows=0.020), Measured(threads=2, one_row=0.005, many_rows=0.021)]
    assert best(busy, Cpus(logical=2, cores=2)) == 1
    slightly = [Measured(threads=n, one_row=0.5, many_rows=2.0 - 0.01 * n) for n in (1, 2, 4)]
    assert best(slightly, Cpus(logical=8, cores=4)) == 1


def test_without_a_measurement_a_core_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cpus", lambda: Cpus(logical=8, cores=4))
    assert default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert default_threads() == 2
    monkeypatch.setattr(threads, "usable_cpus", lambda: Cpus(logical=1, cores=1))
    assert default_threads() == 1


def test_real_layers_are_measured_and_the_choice_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, threads.__name__)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cpus", lambda: Cpus(logical=2, cores=2))
    layers = [PackedLinear(nn.Linear(64, 96, dtype=dtype)) for dtype in (torch.float32, torch.float32)]
    choose_threads(layers)
    # The first test of a process that needs the C++ kernels logs that, too.
    [record] = [record for record in caplog.records if record.name == threads.__name__]
    assert record.message.startswith(f"threads: {torch.get_num_threads()}; 2 CPUs on 2 cores; 2 linear layers")
    assert " by 1, " in record.message and " by 2; measured in " in record.message


def test_a_single_candidate_is_not_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, threads.__name__)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    choose_threads([])
    assert "measured" not in caplog.text
    assert torch.get_num_threads() == 1


def test_a_standby_worker_takes_the_number_of_the_serving_one(tmp_path: Path) -> None:
    def follow(number: int, model: str, *, standby: bool) -> int:
        """The number after a choice that would measure `number`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threads, "choose_threads", lambda _: torch.set_num_threads(number))
            choose_or_follow([], WorkerSettings(runtime_dir=tmp_path, standby=standby), model)
        return torch.get_num_threads()

    assert follow(1, "a", standby=True) == 1
    assert list(tmp_path.iterdir()) == [], "only a serving worker is followed"
    most = usable_cpus().logical
    assert follow(most, "a", standby=False) == most
    assert follow(1, "a", standby=True) == most
    assert follow(1, "b", standby=True) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["worker.threads"]
    for text in ("", "0 a", "999999 a", "x"):
        (tmp_path / "worker.threads").write_text(text)
        assert follow(1, "a", standby=True) == 1
