"""The small stack: that its three ways agree, and that it is attention."""

import subprocess
import sys

import numpy as np
import pytest

from scheduler_svc.kv_lab.measured import HEAD_DIM, HEADS, HIDDEN, Cache, Stack, measure, measure_apart, normed
from tests.architecture.source import ROOT


def plain(stack: Stack, x: np.ndarray, window: int | None) -> np.ndarray:
    """Attention one query, key and head at a time."""
    for query, key, value, out in stack.weights:
        y, made = normed(x), []
        for i in range(len(x)):
            heads = []
            for head in range(HEADS):
                part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
                least = 0 if window is None else max(0, i - window + 1)
                q = (y[i] @ query)[part]
                scores = [float(q @ (y[j] @ key)[part]) / HEAD_DIM**0.5 for j in range(least, i + 1)]
                weights = np.exp(np.array(scores))
                values = np.array([(y[j] @ value)[part] for j in range(least, i + 1)])
                heads.append(weights @ values / weights.sum())
            made.append(x[i] + np.concatenate(heads) @ out)
        x = np.array(made)
    return x[-1]


@pytest.mark.parametrize("window", [None, 1, 3])
def test_all_ways_are_attention(window: int | None):
    stack = Stack(3)
    x = np.random.default_rng(4).standard_normal((7, HIDDEN))
    cache = Cache(stack, 7, window)
    for at in range(7):
        made = cache.step(x[at])
    assert np.abs(made - plain(stack, x, window)).max() < 1e-12
    assert np.abs(stack.recompute(x, window) - plain(stack, x, window)).max() < 1e-12


def test_measuring_tells_times_of_each_way():
    measured = measure(32, None, 0)
    assert measured.window == 8
    assert measured.contexts == tuple(range(2, 33, 2))
    assert measured.largest_difference < 1e-12
    for ms in (measured.recompute_ms, measured.cached_ms, measured.windowed_ms):
        assert len(ms) == len(measured.contexts) and min(ms) > 0


def test_outputs_that_differ_are_no_measurement(monkeypatch: pytest.MonkeyPatch):
    step = Cache.step
    monkeypatch.setattr(Cache, "step", lambda self, x: step(self, x) + 1e-6)
    with pytest.raises(AssertionError, match="the outputs differ by"):
        measure(4, None, 0)


def test_a_process_of_its_own_says_the_same():
    apart, here = measure_apart(8, 3, 5), measure(8, 3, 5)
    assert (apart.window, apart.contexts) == (here.window, here.contexts) == (3, tuple(range(1, 9)))
    assert apart.largest_difference < 1e-12


def test_without_a_service_or_matplotlib():
    probe = "import sys, scheduler_svc.kv_lab.command; print({'matplotlib', 'zmq', 'grpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"
