"""The phases of a start, read from the lines of the programs."""

from tandem_client.services.phases import Phase, Phases, Told


class Start:
    """Phases on a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.phases = Phases(lambda: self.now)

    def hear(self, at: float, name: str, process: str, message: str) -> list[Told]:
        self.now = at
        self.phases.hear(name, f"2026-11-22 02:12:58.026 {process} INFO {message}")
        return list(self.phases.take())

    def worker(self, at: float, message: str) -> list[Told]:
        return self.hear(at, "worker", "worker", message)

    def scheduler(self, at: float) -> list[Told]:
        return self.hear(at, "scheduler", "core", "frontend listening on 127.0.0.1:50051")

    def end(self, at: float, phase: Phase) -> list[Told]:
        self.now = at
        self.phases.end(phase)
        return list(self.phases.take())


def test_a_warm_start_is_told_in_order_with_the_time_of_each_phase() -> None:
    start = Start()
    assert start.phases.now() == Told(Phase.SETTINGS, 0.0)
    assert start.end(0.25, Phase.SETTINGS) == [Told(Phase.SETTINGS, 0.25)]
    assert start.phases.now() == Told(Phase.SCHEDULER, 0.0)
    assert start.scheduler(1.0) == [Told(Phase.SCHEDULER, 0.75)]
    assert start.phases.now() == Told(Phase.IMPORTS, 0.75)
    assert start.worker(2.25, "imports                                 1.90 s") == [Told(Phase.IMPORTS, 2.0)]
    assert start.worker(2.5, "C++ kernels for AVX-512: 0.01 s") == []
    assert start.worker(2.5, "model files                             0.02 s") == []
    assert start.worker(3.5, "weights, float32 on cpu                 0.90 s") == [Told(Phase.WEIGHTS, 1.0)]
    assert start.worker(4.0, "whole start                             3.70 s") == [Told(Phase.WARM_UP, 0.5)]
    assert start.end(4.5, Phase.JOIN) == [Told(Phase.JOIN, 0.5)]
    assert start.phases.now() is None


def test_a_phase_that_ends_before_an_earlier_one_is_told_after_it() -> None:
    start = Start()
    start.end(0.5, Phase.SETTINGS)
    assert start.worker(1.5, "imports                                 1.00 s") == []
    assert start.phases.now() == Told(Phase.SCHEDULER, 1.0)
    assert start.scheduler(2.5) == [Told(Phase.SCHEDULER, 2.0), Told(Phase.IMPORTS, 1.0)]


def test_compiled_kernels_and_large_weights_say_how_far_they_are() -> None:
    start = Start()
    start.end(0.0, Phase.SETTINGS)
    start.scheduler(0.0)
    start.worker(1.0, "compiling the C++ kernels with g++: one file, once for this machine, some 10 to 30 s")
    assert start.worker(1.0, "imports                                 1.00 s") == [Told(Phase.IMPORTS, 1.0)]
    start.worker(11.0, "compiling the C++ kernels: 10 s so far")
    assert start.phases.now() == Told(Phase.COMPILE, 10.0, "10 s so far")
    assert start.worker(21.0, "C++ kernels for AVX-512: 19.90 s") == [Told(Phase.COMPILE, 20.0)]
    start.worker(22.0, "weights: 45 %, 1.20 of 2.60 GiB, 0.50 GiB/s")
    assert start.phases.now() == Told(Phase.WEIGHTS, 1.0, "45 %, 1.20 of 2.60 GiB, 0.50 GiB/s")
