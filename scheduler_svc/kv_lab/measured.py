"""Generating with a KV cache and without one, on this CPU. Owns a small attention stack in numpy and its clock.

Two layers, so that without a cache every position of the prefix is needed again and not the last one alone. The three
ways (recompute all, cache, cache and window) are given the same inputs, and what they make is compared.

`python -m scheduler_svc.kv_lab.measured TOKENS WINDOW SEED` prints one JSON object; a WINDOW of 0: none given.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LAYERS, HEADS, HEAD_DIM = 2, 4, 32
HIDDEN = HEADS * HEAD_DIM
TOLERANCE = 1e-9
"""In double precision, for outputs of size 1."""
_POINTS, _REPEATS = 16, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Milliseconds per token with so many tokens of context, the token itself among them; medians of a few."""

    window: int
    contexts: tuple[int, ...]
    recompute_ms: tuple[float, ...]
    cached_ms: tuple[float, ...]
    windowed_ms: tuple[float, ...]
    largest_difference: float


class Stack:
    """The layers' weights; `recompute` keeps nothing between calls."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (LAYERS, 4, HIDDEN, HIDDEN)
        self.weights: Floats = rng.standard_normal(shape) / np.sqrt(HIDDEN)

    def recompute(self, x: Floats, window: int | None = None) -> Floats:
        """The last position's output float64[HIDDEN], of inputs x float64[t, HIDDEN]."""
        t = len(x)
        position = np.arange(t)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        for query, key, value, out in self.weights:
            y = normed(x)
            q, k, v = (split(y @ matrix) for matrix in (query, key, value))
            scores = np.where(hidden, -np.inf, q @ k.transpose(0, 2, 1))
            x = x + (softmax(scores) @ v).transpose(1, 0, 2).reshape(t, HIDDEN) @ out
        return x[-1]


class Cache:
    """K and V of what went through a stack: float64[LAYERS, HEADS, room, HEAD_DIM] each."""

    def __init__(self, stack: Stack, room: int, window: int | None = None) -> None:
        self._weights = stack.weights
        self._window = window
        self._keys: Floats = np.empty((LAYERS, HEADS, room, HEAD_DIM))
        self._values: Floats = np.empty((LAYERS, HEADS, room, HEAD_DIM))
        self.length = 0

    def step(self, x: Floats) -> Floats:
        """The output float64[HIDDEN] of one more position, of input x float64[HIDDEN]."""
        at = self.length
        seen = slice(0 if self._window is None else max(0, at + 1 - self._window), at + 1)
        for layer, (query, key, value, out) in enumerate(self._weights):
            y = normed(x)
            self._keys[layer, :, at] = (y @ key).reshape(HEADS, HEAD_DIM)
            self._values[layer, :, at] = (y @ value).reshape(HEADS, HEAD_DIM)
            q = (y @ query).reshape(HEADS, 1, HEAD_DIM)
            scores = q @ self._keys[layer, :, seen].transpose(0, 2, 1)
            x = x + (softmax(scores) @ self._values[layer, :, seen]).reshape(HIDDEN) @ out
        self.length += 1
        return x


def normed(x: Floats) -> Floats:
    """Each row at root mean square 1."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))


def split(x: Floats) -> Floats:
    """float64[t, HIDDEN] as float64[HEADS, t, HEAD_DIM]."""
    return x.reshape(len(x), HEADS, HEAD_DIM).transpose(1, 0, 2)


def softmax(scores: Floats) -> Floats:
    """Over the last axis, of scores not yet scaled."""
    scaled = scores / np.sqrt(HEAD_DIM)
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def measure(tokens: int, window: int | None, seed: int) -> Measured:
    """Generates `tokens` tokens with a cache, and some of them without; AssertionError where the outputs differ.

    Without a window that is smaller, a quarter of the tokens.
    """
    span = window if window is not None and window < tokens else max(1, tokens // 4)
    stack = Stack(seed)
    inputs: Floats = np.random.default_rng(seed + 1).standard_normal((tokens, HIDDEN))
    full, windowed = Cache(stack, tokens), Cache(stack, tokens, span)
    contexts = sorted({max(1, tokens * i // _POINTS) for i in range(1, _POINTS + 1)})
    full_ns, windowed_ns = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
    recompute_ns: list[float] = []
    worst = 0.0
    stack.recompute(inputs[:1])
    for at in range(tokens):
        begin = perf_counter_ns()
        one = full.step(inputs[at])
        middle = perf_counter_ns()
        other = windowed.step(inputs[at])
        full_ns[at], windowed_ns[at] = middle - begin, perf_counter_ns() - middle
        if at + 1 in contexts:
            taken: list[int] = []
            again = one
            for _ in range(_REPEATS):
                begin = perf_counter_ns()
                again = stack.recompute(inputs[: at + 1])
                taken.append(perf_counter_ns() - begin)
            recompute_ns.append(float(np.median(taken)))
            seen = stack.recompute(inputs[: at + 1], span)
            worst = max(worst, float(np.abs(one - again).max()), float(np.abs(other - seen).max()))
    assert worst <= TOLERANCE, f"with a cache the outputs differ by {worst}, more than {TOLERANCE}"
    return Measured(
        window=span,
        contexts=tuple(contexts),
        recompute_ms=tuple(ns / 1e6 for ns in recompute_ns),
        cached_ms=tuple(_around(full_ns, at) for at in contexts),
        windowed_ms=tuple(_around(windowed_ns, at) for at in contexts),
        largest_difference=worst,
    )


def _around(ns: npt.NDArray[np.int64], context: int) -> float:
    """Milliseconds: the median of this token and the few before it."""
    return float(np.median(ns[max(0, context - 8) : context])) / 1e6


def measure_apart(tokens: int, window: int | None, seed: int) -> Measured:
    """`measure` in a process of its own, whose linear algebra has one thread.

    More would wait for each other where the machine is busy, and how many there are is fixed when numpy is loaded.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_svc.kv_lab.measured", str(tokens), str(window or 0), str(seed)],
        env=os.environ | one_thread, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    series = {name: tuple(told.pop(name)) for name in ("contexts", "recompute_ms", "cached_ms", "windowed_ms")}
    return Measured(window=told["window"], largest_difference=told["largest_difference"], **series)


def _main() -> None:
    tokens, window, seed = map(int, sys.argv[1:])
    print(json.dumps(asdict(measure(tokens, window or None, seed))))


if __name__ == "__main__":
    _main()
