"""How long a step takes: the shape of a step, and the two cost models, a roofline and a fit to a recorded run.

**Roofline.** Linear layers and attention run one after another on a device, so each has its own roofline, `max(flops /
peak, bytes / bandwidth)`, with both peaks lowered by an efficiency. A fixed time per step is added. The model ignores
that kernels fall short of their peaks at small shapes, and the host's work between steps.

**Fit** to a run that was recorded with --steps. There are four terms, none negative: a constant (kernel launches, the
host), prompt tokens, decode rows, and pages that decode rows read.
"""

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int64Array
from scheduler_svc.simulator.hardware import Machine, Model
from tandem_contract.plural import counted, numbered


@dataclass(slots=True, kw_only=True, eq=False)
class StepShape:
    """One step's work.

    `chunk_starts`, `chunk_counts` int64[c]: first position and tokens of each prompt chunk. `contexts` int64[d]:
    positions that each decode row attends to, its own included. `computed_tokens`: positions that the linear layers
    compute, padding included. `samples`: positions that need logits.
    """

    chunk_starts: Int64Array
    chunk_counts: Int64Array
    contexts: Int64Array
    computed_tokens: int
    samples: int
    pages_copied: int = 0
    host_pages_moved: int = 0


_NONE = np.zeros(0, np.int64)
# The cost of a token of a long prompt is the mean over a chunk of this many.
_LONG_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One worker: `ranks` devices split every layer evenly (tensor parallel), and wait for each other in collectives.

    A weight, activation or cache entry has `value_bytes`. A collective takes `rank_link_us` and the time of its bytes
    at `rank_link_gbps` (10^9 bit/s in one direction), or at the machine's own rate to a peer.
    """

    machine: Machine
    model: Model
    page_size: int
    ranks: int = 1
    value_bytes: int = 2
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    overhead_us: float = 500.0
    rank_link_us: float = 10.0
    rank_link_gbps: float | None = None

    @property
    def name(self) -> str:
        """The model and the machine."""
        many = f"{self.ranks} x " if self.ranks > 1 else ""
        return f"{self.model.name} on {many}{self.machine.name}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model."""
        return self.model.parameters * self.value_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers and ranks together. A KV head is on each rank with query heads that read it."""
        copies = max(1.0, self.ranks / self.model.kv_heads)
        return int(copies * self.model.kv_values * self.value_bytes * self.page_size)

    def pages_in(self, share: float) -> int:
        """Returns the pages that fit beside the weights in this share of the ranks' memory; below 1 if none does."""
        return int((share * self.ranks * self.machine.memory - self.weight_bytes) // self.page_bytes)

    def seconds(self, step: StepShape) -> float:
        """Returns the device's time from the step's start to its result."""
        model, machine = self.model, self.machine
        flops_rate = self.flops_efficiency * machine.flops * self.ranks
        bytes_rate = self.bandwidth_efficiency * machine.bandwidth * self.ranks
        multiplied = step.computed_tokens * model.layer_parameters + step.samples * model.head_parameters
        read = (model.layer_parameters + (model.head_parameters if step.samples else 0)) * self.value_bytes
        seconds = max(2 * multiplied / flops_rate, read / bytes_rate)
        for layers, window in (model.layers - model.window_layers, 0), (model.window_layers, model.window):
            if not layers:
                continue
            pairs, chunk_keys = chunk_attention(step.chunk_starts, step.chunk_counts, window)
            decode_keys = int((np.minimum(step.contexts, window) if window else step.contexts).sum())
            per_pair = 4 * layers * model.heads * model.head_dim
            per_key = 2 * layers * max(model.kv_heads, self.ranks) * model.head_dim * self.value_bytes
            seconds += max(per_pair * pairs / flops_rate, per_key * chunk_keys / bytes_rate)
            seconds += max(per_pair * decode_keys / flops_rate, per_key * decode_keys / bytes_rate)
        seconds += 2 * step.pages_copied * self.page_bytes / bytes_rate
        seconds += step.host_pages_moved * self.page_copy_us() * 1e-6
        return seconds + self._collective_seconds(step) + self.overhead_us * 1e-6

    def page_copy_us(self) -> float:
        """Returns the time to copy one page over the host link, to which each device contributes its part."""
        return 1e6 * self.page_bytes / (self.bandwidth_efficiency * self.machine.host_bandwidth * self.ranks)

    def token_us(self) -> float:
        """Returns the time per token of a long prompt's first chunk."""
        start, count = np.zeros(1, np.int64), np.array([_LONG_CHUNK])
        step = StepShape(chunk_starts=start, chunk_counts=count, contexts=_NONE, computed_tokens=_LONG_CHUNK, samples=0)
        return 1e6 * self.seconds(step) / _LONG_CHUNK

    def _collective_seconds(self, step: StepShape) -> float:
        """Returns the time of a step's collectives.

        A ring all-reduce of the activations after the embedding, after each attention and after each MLP; the gathering
        of the logits; and the broadcast of the tokens.
        """
        if self.ranks == 1:
            return 0.0
        all_reduces, part = 2 * self.model.layers + 1, (self.ranks - 1) / self.ranks
        moved = (
            2 * part * all_reduces * step.computed_tokens * self.model.hidden
            + part * step.samples * self.model.vocab_size
        )
        rate = self.bandwidth_efficiency * self.machine.peer_bandwidth
        if self.rank_link_gbps is not None:
            rate = self.rank_link_gbps * 1e9 / 8
        return moved * self.value_bytes / rate + (all_reduces + 2) * self.rank_link_us * 1e-6


def chunk_attention(starts: Int64Array, counts: Int64Array, window: int) -> tuple[int, int]:
    """Returns the unmasked pairs of query and key, and the keys read, of chunks at these positions.

    Query q attends to q + 1 keys, of which a `window` above 0 leaves the newest.
    """
    if not len(starts):
        return 0, 0
    ends = starts + counts
    pairs = _pairs_before(ends, window) - _pairs_before(starts, window)
    keys = ends if not window else np.minimum(ends, counts + window - 1)
    return int(pairs.sum()), int(keys.sum())


def _pairs_before(ends: Int64Array, window: int) -> Int64Array:
    """Returns the pairs of all queries before each of `ends`."""
    growing = ends if not window else np.minimum(ends, window)
    return growing * (growing + 1) // 2 + (ends - growing) * window


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
            f"fitted to {counted(self.steps, 'step')}{left_out}: R2 {self.r_squared:.4f}, a step off by "
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


CostModel = Roofline | FittedCost
"""Predicts how long a step takes."""


def read_steps(path: Path) -> RecordedSteps:
    """Reads a file of --steps. Raises OSError, and ValueError if it is malformed or has too few steps."""
    features: list[tuple[float, float, float, float]] = []
    times: list[float] = []
    pages_total = 0
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it must be a file written by --steps")
        for row in reader:
            if row["kind"] not in _STEP_KINDS:
                continue
            prefill, decode, used, total, ms = (_number(path, reader.line_num, row, name) for name in _COLUMNS[1:])
            if ms > 0:
                features.append((1.0, prefill, decode, used if decode else 0.0))
                times.append(ms)
                pages_total = max(pages_total, int(total))
    if len(times) < _MIN_STEPS:
        raise ValueError(f"{path} has {numbered(len(times), 'timed step')}; a fit needs at least {_MIN_STEPS}")
    return RecordedSteps(features=np.array(features), ms=np.array(times), pages_total=pages_total)


def _number(path: Path, line: int, row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= _MAX:
        raise ValueError(f"{path}, line {line}: {name} is {row[name]!r}; it must be a number from 0 to {_MAX:g}")
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
