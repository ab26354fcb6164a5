"""A worker killed (SIGKILL) under 64 streams: every stream goes on and ends with the tokens of an undisturbed run.

The equality is judged on the bundled model in float32, greedy: its logits have margins that rounding does not cross,
and a resumed row's K and V are computed again in other batches. Then a model of true size in bfloat16 shows the pause,
with a worker that has to start, with a second one that serves already, and with one on standby that takes over the KV
pool; there equal tokens are a figure.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpu_worker.settings import BUNDLED_MODEL
from tests.measure.gpu_day import workloads
from tests.measure.gpu_day.clients import Completions
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.runners import checkpoint
from tests.measure.gpu_day.service import START_SECONDS, Service
from tests.measure.gpu_day.workloads import Requests
from tests.rigs.processes import Child

_STREAMS = 64
_BUNDLED_SIZES = {"page_size": 16, "max_rows": 12, "max_length": 512, "token_budget": 128, "num_pages": 128}
_TINY_BUNDLED = {**_BUNDLED_SIZES, "dtype": "float32"}
_LARGE_BUNDLED = {"max_rows": 64, "max_length": 512, "token_budget": 1024, "num_pages": 600, "dtype": "float32"}
_LARGE = {"max_rows": 64, "max_length": 2048, "token_budget": 2048, "num_pages": 800, "dtype": "bfloat16"}
_LEAST_SECONDS_LEFT = 45.0
_LOOK_SECONDS, _WAIT_SECONDS = 0.002, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """A run in which a worker was killed."""

    completions: Completions
    killed_at: float

    @property
    def pause(self) -> float:
        """The longest time in seconds between two tokens of a stream, the second after the kill.

        A stream's first token after the kill may have been on its way, so its later ones count too.
        """
        gaps = [0.0]
        for times in self.completions.times:
            gaps += [after - before for before, after in pairwise(times) if after > self.killed_at]
        return max(gaps)

    @property
    def num_running(self) -> int:
        """Streams that had not ended at the kill."""
        return sum(times[-1] > self.killed_at for times in self.completions.times)


def run(day: Day) -> None:
    """The bundled model first, because it decides; then the pauses."""
    count = 12 if day.tiny else _STREAMS
    requests = workloads.bundled(count, output=24 if day.tiny else 400)
    sizes = _TINY_BUNDLED if day.tiny else _LARGE_BUNDLED
    for disturb in (_on_one, _on_standby):
        disturb(day, "bundled model", BUNDLED_MODEL, requests, sizes, must_equal=True)
    if day.tiny:
        return
    folder = str(checkpoint(day, "Qwen3-0.6B"))
    large = workloads.equal_lengths(_STREAMS, prompt=300, output=1000, vocabulary=150_000)
    if day.seconds_left() > 2 * _LEAST_SECONDS_LEFT:
        for disturb in (_on_one, _on_standby):
            disturb(day, "Qwen3-0.6B", folder, large, _LARGE, must_equal=False)
    else:
        day.record.note("Qwen3-0.6B was left out: the time was over")


def _on_one(day: Day, name: str, model: str, requests: Requests, sizes: dict[str, Any], *, must_equal: bool) -> None:
    """Undisturbed; one of two workers killed; then the only worker killed, with another that starts afterwards."""
    with Service(day, model, num_frontends=1, **sizes) as service:
        with day.phase(f"{name}: start of the workers"):
            workers = [service.launch_worker() for _ in range(2)]
            for worker in workers:
                worker.wait_line("joined", START_SECONDS)
            service.client.wait_ready(60)
        with day.phase(f"{name}: undisturbed"):
            calm = service.run(requests, workers[0], num_processes=1)
        while workers:
            case = "another serves" if len(workers) > 1 else "a worker starts"
            if case == "a worker starts" and day.seconds_left() < _LEAST_SECONDS_LEFT:
                day.record.note(f"{name}, {case}: left out, the time was over")
                return
            with day.phase(f"{name}: killed, {case}"):
                disturbed = _killed(day, service, requests, workers.pop(), starts=not workers)
            _judge(day, f"{name}, {case}", requests, calm.completions, disturbed, must_equal=must_equal)


def _on_standby(
    day: Day, name: str, model: str, requests: Requests, sizes: dict[str, Any], *, must_equal: bool
) -> None:
    """Undisturbed; then killed while another worker waits on standby, which takes the pool over."""
    if day.seconds_left() < 2 * _LEAST_SECONDS_LEFT:
        day.record.note(f"{name}, a standby worker: left out, the time was over")
        return
    with Service(day, model, num_frontends=1, shared_pool="on", **sizes) as service:
        with day.phase(f"{name}: start of a worker and of one on standby"):
            holder = service.rig.holder()
            serving = service.launch_worker(standbys=1)
            serving.wait_line("joined", START_SECONDS)
            service.client.wait_ready(60)
            waiting = service.launch_worker(standby=True, standby_pages=sizes["num_pages"])
            while service.client.load().standby_workers < 1:
                assert waiting.exit_code is None, waiting.output()
                time.sleep(_WAIT_SECONDS)
        with day.phase(f"{name}: undisturbed"):
            calm = service.run(requests, serving, num_processes=1)
        case = f"{name}, a standby worker takes the pool over"
        with day.phase(case):
            disturbed = _killed(day, service, requests, serving, starts=False)
        _judge(day, case, requests, calm.completions, disturbed, must_equal=must_equal)
        day.record.check(f"{case}: it did", "takes pool" in holder.output())


def _killed(day: Day, service: Service, requests: Requests, worker: Child, *, starts: bool) -> Disturbed:
    """Runs the requests and kills the worker when a third of their tokens is out."""
    fleet = service.fleet(requests, num_processes=1)
    try:
        wanted = service.client.load().output_tokens + requests.num_output_tokens // 3
        fleet.start()
        while service.client.load().output_tokens < wanted:
            time.sleep(_LOOK_SECONDS)
        killed_at = time.perf_counter()
        worker.kill()
        if starts:
            service.launch_worker()
        completions = fleet.result(max(20.0, day.seconds_left()))
    finally:
        fleet.end()
    return Disturbed(completions=completions, killed_at=killed_at)


def _judge(
    day: Day, name: str, requests: Requests, calm: Completions, disturbed: Disturbed, *, must_equal: bool
) -> None:
    found = disturbed.completions.tokens
    whole = [len(tokens) for tokens in found] == requests.output_lengths
    day.record.check(f"{name}: every stream has all of its tokens", whole, f"{len(found)} streams")
    day.record.check(f"{name}: streams ran when the worker was killed", disturbed.num_running > 0)
    differing = [i for i, (a, b) in enumerate(zip(calm.tokens, found, strict=True)) if a != b]
    if must_equal:
        detail = f"{len(found) - len(differing)} of {len(found)} streams"
        day.record.check(f"{name}: tokens equal those of an undisturbed run", not differing, detail)
    else:
        day.record.figure(
            f"{name}: streams equal to an undisturbed run",
            len(found) - len(differing),
            f"of {len(found)}",
            note="rounding in bfloat16 decides near ties of random weights; not judged",
        )
    day.record.figure(f"{name}: streams that ran at the kill", disturbed.num_running, "streams", Kind.COUNTED)
    day.record.figure(f"{name}: pause", disturbed.pause, "s", note="the longest between two tokens of a stream")
