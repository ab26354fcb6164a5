"""Times of device work, and the device's own rates: copying, matrix products, the size of its cache.

Owns how something is timed: on a GPU captured in a CUDA graph, so that launches by the host do not count.
"""

import time
from collections.abc import Callable

import torch

_WARM_RUNS = 2
_CPU_CACHE_BYTES = 1 << 18


def device_seconds(run: Callable[[], object], device: torch.device, *, repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs. The first, unmeasured ones may compile kernels."""
    with torch.inference_mode():
        for _ in range(_WARM_RUNS):
            run()
        if device.type == "cpu":
            return [_host_seconds(run) for _ in range(repeats)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        seconds: list[float] = []
        for _ in range(repeats):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            seconds.append(started.elapsed_time(ended) / 1e3)
        graph.reset()
        return seconds


def _host_seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last cache; on a CPU a small number, for tiny runs."""
    if device.type == "cpu":
        return _CPU_CACHE_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def copy_rate(device: torch.device, *, repeats: int = 7) -> list[float]:
    """Bytes per second, read and written, of copies of a tensor 32 times as large as the cache."""
    num_bytes = 32 * cache_bytes(device)
    source, target = (torch.zeros(num_bytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    source.normal_()
    return [2 * source.nbytes / s for s in device_seconds(lambda: target.copy_(source), device, repeats=repeats)]


def matmul_rate(device: torch.device, dtype: torch.dtype, *, size: int, repeats: int = 7) -> list[float]:
    """FLOP per second of square matrix products."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    seconds = device_seconds(lambda: torch.mm(left, right, out=out), device, repeats=repeats)
    return [2 * size**3 / s for s in seconds]
