"""Seconds from the start of a worker's process until it serves: with an empty compile cache, then with a full one."""

import time

from tests.measure.gpu_day import published
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import TINY_SIZES
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.runners import checkpoint
from tests.measure.gpu_day.service import START_SECONDS, Service

_LEAST_SECONDS_LEFT = 60.0


def run(day: Day) -> None:
    """One cold start, then warm ones."""
    folder = checkpoint(day, "Qwen3-0.6B")
    cache = day.scratch / "compile-cache"
    warm: list[float] = []
    cold = _start(day, str(folder), str(cache), "cold")
    day.record.figure("cold start", cold, "s", note="empty compile cache, default settings")
    while not warm or (len(warm) < 3 and not day.tiny and day.seconds_left() > _LEAST_SECONDS_LEFT):
        warm.append(_start(day, str(folder), str(cache), f"warm {len(warm) + 1}"))
    day.record.repeated("warm start", warm, "s")
    if not day.tiny:
        day.record.figure("aim, cold", published.AIM_COLD_START_SECONDS, "s", Kind.AIM)
        day.record.figure("aim, warm", published.AIM_WARM_START_SECONDS, "s", Kind.AIM)


def _start(day: Day, folder: str, cache: str, name: str) -> float:
    """Starts a service and a worker, and streams a token. Returns the worker's seconds until it has joined."""
    # Triton keeps its own cache, in a folder of its own.
    environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache + "/triton"}
    with day.phase(name), Service(day, folder, num_frontends=1, **(TINY_SIZES if day.tiny else {})) as service:
        begun = time.perf_counter()
        worker = service.launch_worker(environment)
        worker.wait_line("joined", START_SECONDS)
        seconds = time.perf_counter() - begun
        service.client.wait_ready(60)
        tokens = [token for delta in service.client.generate([5, 6, 7], max_new_tokens=2) for token in delta.token_ids]
        first = time.perf_counter() - begun
    day.record.check(f"{name}: the worker serves", bool(tokens))
    day.record.figure(f"{name}: first answer", first, "s", note="of a service whose scheduler waits already")
    phases = [line.split(" INFO ", 1)[-1] for line in worker.lines if " s" in line[-3:] and "  " in line]
    day.record.note(f"{name}: " + "; ".join(" ".join(phase.split()) for phase in phases))
    return seconds
