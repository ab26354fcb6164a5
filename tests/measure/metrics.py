"""Measures what the metrics page costs where it is measured: `python -m tests.measure.metrics [--json] [--steps N]`.

`step_us` is what a step adds to the core's thread: the figures of its result, and of the turn. `flight_us` is what the
flight recorder adds besides: a result and a tick, each with its effects. `look_us` and
`report_us` come once a second, the latter per front end. `delta_us` is what a delta adds to a front end, `request_us`
what a request adds besides. `page_ms` is the time to make the text, without its pauses. Figures are wall time of one
thread, medians.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.exposition import generate_latest
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages import events as ev
from scheduler_svc.metrics import page as page_module
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.metrics.front_meter import FrontMeter
from scheduler_svc.metrics.page import Page
from scheduler_svc.recording.flight import FlightRecorder
from tests.measure.harness import Bar, Measurement
from tests.measure.schedulers.loaded_core import LoadedCore

STEP_BAR_US, DELTA_BAR_US = 5.0, 2.0
CONTEXT, ROWS = 512, 256
_BATCH, _BATCHES = 1000, 50


class MeasuredCore(LoadedCore):
    """Measures each result before the core reads it, as the shell does, and the turn after it."""

    def __init__(self, num_steps: int) -> None:
        self.meter = CoreMeter()
        self.step_us: list[float] = []
        self.flight_us: list[float] = []
        # It writes to its folder only after a death.
        self._flight, self._flight_ns = FlightRecorder(Path(os.devnull)), 0
        super().__init__(ROWS, CONTEXT, num_steps)
        self.step_us.clear()
        self.flight_us.clear()

    def _handle(self, event: ev.Event) -> Any:
        if isinstance(event, ev.StepDone):
            begun = time.perf_counter_ns()
            self.meter.step_arrived(event, self._core)
            self.meter.turned(self._core, 0.0)
            self.step_us.append((time.perf_counter_ns() - begun) / 1e3)
        effects = super()._handle(event)
        begun = time.perf_counter_ns()
        self._flight.handled(self._now, event, effects)
        self._flight_ns += time.perf_counter_ns() - begun
        if isinstance(event, ev.Tick):
            self.flight_us.append(self._flight_ns / 1e3)
            self._flight_ns = 0
        return effects

    def look_us(self) -> float:
        return _us_each(lambda: self.meter._look(self._core))


def _us_each(call: Callable[[], object], *, batch: int = _BATCH, batches: int = _BATCHES) -> float:
    """Microseconds of one call, the median over batches."""
    found: list[float] = []
    for _ in range(batches):
        begun = time.perf_counter_ns()
        for _ in range(batch):
            call()
        found.append((time.perf_counter_ns() - begun) / 1e3 / batch)
    return float(np.median(found))


def measure_front() -> tuple[FrontMeter, dict[str, float]]:
    """The figures of a front end's meter."""
    front = FrontMeter()
    stream = front.stream()
    stream.accepted(100, "tenant")
    sample, sent = stream.sample(), 0

    def delta() -> None:
        nonlocal sent
        sent += 1
        sample.sent(sent)

    summary = pb.Summary(usage=pb.Usage(prompt_tokens=100, output_tokens=200), timing=pb.Timing(decode_seconds=2.0))

    def request() -> None:
        one = front.stream()
        one.accepted(100, "tenant")
        one.sample()
        one.finished(summary, [pb.FINISH_REASON_LENGTH])

    return front, {"delta_us": _us_each(delta), "request_us": _us_each(request)}


def measure(num_steps: int) -> dict[str, float]:
    core = MeasuredCore(num_steps)
    for _ in range(num_steps):
        core.steady_step()
    front, of_front = measure_front()
    report = front.report(0)
    page_module._PAUSE_SECONDS = 0.0
    page = Page(core.meter, lambda: ("tenant",))
    return {
        "step_us": float(np.median(core.step_us)),
        "flight_us": float(np.median(core.flight_us)),
        "look_us": core.look_us(),
        "report_us": _us_each(lambda: core.meter.fronts.take("f-1", report)),
        **of_front,
        "page_ms": _us_each(lambda: generate_latest(page), batch=1, batches=20) / 1e3,
    }


def main() -> int:
    measurement = Measurement("metrics")
    measurement.flag("--steps", type=int, default=600, help="measured steps of the core")
    figures = measure(measurement.begin().steps)
    measurement.line({"rows": ROWS, **figures})
    measurement.bar(
        Bar(name="us of core time per step", value=figures["step_us"], limit=STEP_BAR_US),
        Bar(name="us per step for the flight recorder", value=figures["flight_us"], limit=STEP_BAR_US),
        Bar(name="us of front end time per delta", value=figures["delta_us"], limit=DELTA_BAR_US),
    )
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
