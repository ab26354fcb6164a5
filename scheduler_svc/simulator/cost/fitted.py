"""A step's duration fitted to a run that was recorded with --steps.

Owns the reading of that file, the least squares and what is said of their error. The terms are few, each has a meaning
and none may be negative: a constant (launches, the host), prompt tokens, decode rows, pages that decode rows read.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.cost.step_cost import StepShape

FloatArray = npt.NDArray[np.float64]

TERMS = ("step", "prompt token", "decode row", "page read")
_STEP_KINDS = {"prefill", "decode", "mixed"}
_COLUMNS = ("kind", "prefill_tokens", "decode_tokens", "pages_used", "pages_total", "ms")
_LEAST_STEPS = 20
# Steps this many times as far off as the median one are no steps of the steady state: compiles, pauses.
_OUTLIER = 20.0
_NO_ERROR = 0.01
_MOST = 1e12
_TINY = 1e-12


class StepsFileError(ValueError):
    """The file cannot be fitted; the message names the file, and line and column where one is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSteps:
    """`features` float64[n, 4], one column per term; `ms` float64[n], the worker's own time."""

    features: FloatArray
    ms: FloatArray
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """`coefficients` are milliseconds per term; from `steps` on: how well they do on what they were fitted to.

    Page copies were not recorded: to and from host memory one costs `copy_us`, on the device nothing.
    """

    coefficients: tuple[float, float, float, float]
    page_size: int
    copy_us: float
    steps: int
    left_out: int
    r_squared: float
    median_error: float
    p90_error: float

    @property
    def name(self) -> str:
        """The formula."""
        parts = [f"{value * 1e3:.4g} us/{term}" for value, term in zip(self.coefficients, TERMS, strict=True) if value]
        return "fitted: " + " + ".join(parts)

    @property
    def verdict(self) -> str:
        """How far it is off, in a sentence."""
        left_out = f", {self.left_out} left out as outliers" if self.left_out else ""
        return (
            f"fitted to {self.steps:,} steps{left_out}: R2 {self.r_squared:.4f}, a step off by "
            f"{self.median_error:.1%} (median), {self.p90_error:.1%} (p90)"
        )

    def seconds(self, step: StepShape) -> float:
        """Of one step."""
        fixed, per_prompt_token, per_row, per_page = self.coefficients
        pages = int((-(-step.contexts // self.page_size)).sum()) if per_page else 0
        prompt_tokens = int(step.chunk_counts.sum())
        ms = fixed + per_prompt_token * prompt_tokens + per_row * len(step.contexts) + per_page * pages
        return 1e-3 * max(ms, _TINY) + 1e-6 * self.copy_us * step.host_pages_moved

    def page_copy_us(self) -> float:
        """As it was told."""
        return self.copy_us

    def token_us(self) -> float:
        """Of a prompt."""
        return 1e3 * self.coefficients[1]


def read_steps(path: Path) -> RecordedSteps:
    """Raises OSError, and StepsFileError for a file that is none of --steps or holds too little."""
    features: list[tuple[float, float, float, float]] = []
    times: list[float] = []
    pages_total = 0
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise StepsFileError(f"{path}: no column {', '.join(missing)}; it must be a file of --steps")
        for row in reader:
            if row["kind"] not in _STEP_KINDS:
                continue
            prefill, decode, used, total, ms = (_number(path, reader.line_num, row, name) for name in _COLUMNS[1:])
            if ms > 0:
                features.append((1.0, prefill, decode, used if decode else 0.0))
                times.append(ms)
                pages_total = max(pages_total, int(total))
    if len(times) < _LEAST_STEPS:
        raise StepsFileError(f"{path}: {len(times)} timed steps; a fit needs at least {_LEAST_STEPS}")
    return RecordedSteps(features=np.array(features), ms=np.array(times), pages_total=pages_total)


def _number(path: Path, line: int, row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= _MOST:
        raise StepsFileError(f"{path}, line {line}: {name} is {row[name]!r}; it must be a number from 0 to {_MOST:g}")
    return value


def fit(recorded: RecordedSteps, *, page_size: int, copy_us: float) -> FittedCost:
    """Least squares of relative errors, twice: the second time without the outliers of the first."""
    features, ms = recorded.features, recorded.ms
    coefficients = _coefficients(features, ms)
    errors = np.abs(features @ coefficients / ms - 1)
    kept = errors <= max(_OUTLIER * float(np.median(errors)), _NO_ERROR)
    coefficients = _coefficients(features[kept], ms[kept])
    off, measured = features[kept] @ coefficients - ms[kept], ms[kept]
    spread = float(((measured - measured.mean()) ** 2).sum())
    fixed, prompt_token, row, page = (float(value) for value in coefficients)
    return FittedCost(
        coefficients=(fixed, prompt_token, row, page),
        page_size=page_size,
        copy_us=copy_us,
        steps=int(kept.sum()),
        left_out=int((~kept).sum()),
        r_squared=1 - float((off**2).sum()) / spread if spread > 0 else 1.0,
        median_error=float(np.median(np.abs(off) / measured)),
        p90_error=float(np.percentile(np.abs(off) / measured, 90)),
    )


def _coefficients(features: FloatArray, ms: FloatArray) -> FloatArray:
    # Divided by the measured time: else a few long prompts decide, and decode steps are most of a run.
    return non_negative_least_squares(features / ms[:, None], np.ones(len(ms)))


def non_negative_least_squares(a: FloatArray, b: FloatArray) -> FloatArray:
    """x >= 0 that makes |a x - b| least (Lawson and Hanson 1974, active set). `a` float64[m, n] of few columns."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    columns = a.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max()))
    # It ends after finitely many rounds; the bound is for rounding errors.
    for _ in range(10 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            solution = np.zeros(columns)
            solution[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (solution <= 0)
            if not below.any():
                break
            step = (x[below] / np.maximum(x[below] - solution[below], _TINY)).min()
            x = x + step * (solution - x)
            free &= x > _TINY
            x[~free] = 0.0
        x = solution
    return x / scale
