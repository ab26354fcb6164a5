"""A step's duration, fitted to a run that was recorded with --steps.

Owns the reading of that file, the least squares and the report of their error. There are four terms, none negative: a
constant (kernel launches, the host), prompt tokens, decode rows, and pages that decode rows read.
"""

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.cost.step_cost import StepShape

FloatArray = npt.NDArray[np.float64]

TERMS = ("step", "prompt token", "decode row", "page read")
_STEP_KINDS = {"prefill", "decode", "mixed"}
_COLUMNS = ("kind", "prefill_tokens", "decode_tokens", "pages_used", "pages_total", "ms")
_MIN_STEPS = 20
# Steps with this many times the median error are left out: they contain compiles or pauses.
_OUTLIER = 20.0
_NO_ERROR = 0.01
_MAX = 1e12
_TINY = 1e-12


class StepsFileError(ValueError):
    """A file that cannot be fitted. The message names the file, and the line and column if one is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSteps:
    """`features` float64[n, 4] has one column per term. `ms` float64[n] is the worker's own time per step."""

    features: FloatArray
    ms: FloatArray
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """`coefficients` are milliseconds per term. The fields from `steps` on describe the quality of the fit.

    The file does not record page copies: a copy to or from host memory takes `copy_us`, one on the device no time.
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
        """The formula of the fit."""
        parts = [f"{value * 1e3:.4g} us/{term}" for value, term in zip(self.coefficients, TERMS, strict=True) if value]
        return "fitted: " + " + ".join(parts)

    @property
    def verdict(self) -> str:
        """The error of the fit, in a sentence."""
        left_out = f", {self.left_out} left out as outliers" if self.left_out else ""
        return (
            f"fitted to {self.steps:,} steps{left_out}: R2 {self.r_squared:.4f}, a step off by "
            f"{self.median_error:.1%} (median), {self.p90_error:.1%} (p90)"
        )

    def seconds(self, step: StepShape) -> float:
        """Returns the duration of one step."""
        fixed, per_prompt_token, per_row, per_page = self.coefficients
        pages = int((-(-step.contexts // self.page_size)).sum()) if per_page else 0
        prompt_tokens = int(step.chunk_counts.sum())
        ms = fixed + per_prompt_token * prompt_tokens + per_row * len(step.contexts) + per_page * pages
        return 1e-3 * max(ms, _TINY) + 1e-6 * self.copy_us * step.host_pages_moved

    def page_copy_us(self) -> float:
        """Returns the time to copy one page to or from host memory."""
        return self.copy_us

    def token_us(self) -> float:
        """Returns the time per prompt token."""
        return 1e3 * self.coefficients[1]


def read_steps(path: Path) -> RecordedSteps:
    """Reads a file of --steps. Raises OSError, and StepsFileError if it is malformed or has too few steps."""
    features: list[tuple[float, float, float, float]] = []
    times: list[float] = []
    pages_total = 0
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise StepsFileError(f"{path} has no column {', '.join(missing)}; it must be a file written by --steps")
        for row in reader:
            if row["kind"] not in _STEP_KINDS:
                continue
            prefill, decode, used, total, ms = (_number(path, reader.line_num, row, name) for name in _COLUMNS[1:])
            if ms > 0:
                features.append((1.0, prefill, decode, used if decode else 0.0))
                times.append(ms)
                pages_total = max(pages_total, int(total))
    if len(times) < _MIN_STEPS:
        raise StepsFileError(f"{path} has {len(times)} timed steps; a fit needs at least {_MIN_STEPS}")
    return RecordedSteps(features=np.array(features), ms=np.array(times), pages_total=pages_total)


def _number(path: Path, line: int, row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= _MAX:
        raise StepsFileError(f"{path}, line {line}: {name} is {row[name]!r}; it must be a number from 0 to {_MAX:g}")
    return value


def fit(recorded: RecordedSteps, *, page_size: int, copy_us: float) -> FittedCost:
    """Minimises the squares of the relative errors twice, the second time without the outliers of the first."""
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
    # Relative errors, because absolute ones would let a few long prompts outweigh the many decode steps.
    return non_negative_least_squares(features / ms[:, None], np.ones(len(ms)))


def non_negative_least_squares(a: FloatArray, b: FloatArray) -> FloatArray:
    """Returns the x >= 0 that minimises |a x - b|: the best least squares of all subsets of the few columns of `a`."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    columns = range(a.shape[1])
    best, least = np.zeros(len(columns)), float(np.linalg.norm(b))
    tolerance = _TINY * least
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, size + 1) for size in columns):
        x = np.zeros(len(columns))
        x[list(chosen)] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        error = float(np.linalg.norm(a @ x - b))
        # More columns must be better by more than a rounding error.
        if (x >= 0).all() and error < least - tolerance:
            best, least = x, error
    return best / scale
