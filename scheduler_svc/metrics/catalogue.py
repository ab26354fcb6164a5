"""Every metric of the page: name, type, help, labels, buckets; and the numbers of one histogram. Measures nothing.

Names and buckets follow vLLM 0.32 (`vllm/v1/metrics/loggers.py`, `buckets.py`) with the prefix `tandem_`, so that
boards made for it need a new prefix only; what vLLM does not have comes last. No label has a value that a caller chose:
label values are listed here, or come from the token file (`tenant`) or from a number of places (`worker`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scheduler_svc.core.messages.effects import EndReason
from scheduler_svc.core.messages.reports import SERVICE_REASONS, ResetCause, StepKind

PREFIX = "tandem_"
# What one metric has: the values of its labels, and the number; of a histogram the count of each bucket, and the sum.
Samples = Sequence[tuple[tuple[str, ...], Any]]


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric. Each is one object of this module."""

    name: str
    """As on the page, but without `_bucket`, `_sum` and `_count`. That of a counter ends with `_total`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """The values of the only label, if they are known beforehand."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, without infinity."""

    @property
    def num_cells(self) -> int:
        """How many numbers a front end reports for it: one per value of the label; or each bucket, and the sum."""
        return len(self.buckets) + 2 if self.buckets else max(1, len(self.values))

    def samples(self, *cells: float) -> Samples:
        """From its `num_cells` numbers, if all values of its labels are known beforehand."""
        if self.values:
            return [((value,), cell) for value, cell in zip(self.values, cells, strict=True)]
        return [((), cells if self.buckets else cells[0])]


_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),)
# vLLM ends at the model's longest sequence.
_TOKENS = (*(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5)), 1_000_000)
_STEP_TOKENS = tuple(2**exponent for exponent in (0, *range(3, 15)))
_STEP = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10),
)
_CORE_STEP = (*(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5), 1)

# The names of gRPC's status codes.
CODES = (
    *("cancelled", "unknown", "invalid_argument", "deadline_exceeded", "not_found", "already_exists"),
    *("permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range", "unimplemented"),
    *("internal", "unavailable", "data_loss", "unauthenticated"),
)
REASONS = tuple(reason.name.lower() for reason in EndReason)
CAUSES = tuple(cause.name.lower() for cause in ResetCause)
NOT_SERVING_REASONS = tuple(reason.name.lower() for reason in SERVICE_REASONS)
# Why a constraint was refused: the service takes none; its form, a limit or another field; a keyword; its trial; the
# trial took too long or ended its process; the machine was too busy to try it; too many of the tenant wait.
CONSTRAINT_REASONS = ("unserved", "grammar", "keyword", "trial", "killed", "busy", "waiting")
STEP_KINDS = tuple(kind.value for kind in (StepKind.PREFILL, StepKind.DECODE, StepKind.MIXED))


def _counter(name: str, text: str, *labels: str, values: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"{PREFIX}{name}_total", kind=Kind.COUNTER, help=text, labels=labels, values=values)


def _gauge(name: str, text: str, *labels: str, values: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"{PREFIX}{name}", kind=Kind.GAUGE, help=text, labels=labels, values=values)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name=f"{PREFIX}{name}", kind=Kind.HISTOGRAM, help=text, labels=labels, buckets=buckets)


# Metrics of the core.
RUNNING = _gauge("num_requests_running", "Samples of requests that have a row of a worker.")
WAITING = _gauge("num_requests_waiting", "Samples of requests in the queue.")
KV_USAGE = _gauge("kv_cache_usage_perc", "Share of a worker's pages that running requests use, 0 to 1.", "worker")
CACHE_QUERIES = _counter("prefix_cache_queries", "Prompt tokens of requests that have had a row.")
CACHE_HITS = _counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
PREEMPTIONS = _counter("num_preemptions", "Requests that gave up their row to others.")
# Metrics of the front ends.
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of accepted requests.")
GENERATION_TOKENS = _counter("generation_tokens", "Output tokens sent to callers.")
SUCCESSES = _counter("request_success", "Samples of requests that got a Summary.", "finished_reason", values=REASONS)
REJECTIONS = _counter("admission_rejections", "Generate calls that were refused.", "code", values=CODES)
FIRST_TOKEN = _histogram("time_to_first_token_seconds", "From a call's message to its first delta.", _FIRST_TOKEN)
BETWEEN_TOKENS = _histogram(
    "inter_token_latency_seconds",
    "Between the tokens of a sample; n tokens of a delta as n equal gaps.",
    _BETWEEN_TOKENS,
)
PER_TOKEN = _histogram(
    "request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _BETWEEN_TOKENS
)
LATENCY = _histogram("e2e_request_latency_seconds", "From a call's message to its Summary.", _LATENCY)
QUEUE_TIME = _histogram("request_queue_time_seconds", "From the queue to the first row.", _LATENCY)
PREFILL_TIME = _histogram("request_prefill_time_seconds", "From the first row to the first token.", _LATENCY)
DECODE_TIME = _histogram("request_decode_time_seconds", "From the first token to the last.", _LATENCY)
REQUEST_PROMPT = _histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
REQUEST_OUTPUT = _histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
# Metrics of the core.
STEP_TOKENS = _histogram("iteration_tokens_total", "Positions that a step computed.", _STEP_TOKENS)
# What vLLM does not have. Of front ends first.
FAILURES = _counter("request_failures", "Accepted requests that ended with an error.", "code", values=CODES)
DISCARDED = _counter("discarded_tokens", "Tokens computed after the end of their output.")
RECOMPUTED = _counter("recomputed_tokens", "Positions computed again after a preemption or the loss of a worker.")
CHANGES_SURVIVED = _counter("worker_changes_survived", "Lane resets that requests with a Summary went through.")
CONSTRAINT_REFUSALS = _counter(
    "constraint_refusals", "Constraints that were refused.", "reason", values=CONSTRAINT_REASONS
)
TRIALS = _counter("constraint_trials", "Grammars that were tried.")
TRIAL_KILLS = _counter("constraint_trial_kills", "Trials that ended with the death of their process.")
BACKLOG = _gauge("frontend_stream_backlog_bytes", "Output that waits for callers that do not read.")
TENANT_PROMPT = _counter("tenant_prompt_tokens", "Prompt tokens of a tenant's accepted requests.", "tenant")
TENANT_OUTPUT = _counter("tenant_generation_tokens", "Output tokens sent to a tenant's callers.", "tenant")
# Metrics of the core.
NOT_SERVING = _gauge(
    "not_serving", "1 for the reason why a request that arrives is not computed.", "reason", values=NOT_SERVING_REASONS
)
NOT_SERVING_SINCE = _gauge(
    "not_serving_since_seconds", "Unix time since which no request is computed; 0 while requests are."
)
WORKERS = _gauge("workers", "Workers that take requests.")
STANDBY_WORKERS = _gauge("standby_workers", "Workers on standby that could take over.")
FRONTENDS = _gauge("frontends", "Front ends that are connected to the core.")
RESETS = _counter(
    "lane_resets", "Resets of a worker's lane: all its requests went back to the queue.", "cause", values=CAUSES
)
DEATHS = _counter("frontend_deaths", "Front ends that were lost, each with its last unreported second.")
STEP_SECONDS = _histogram("step_seconds", "A worker's time for a step.", _STEP, "worker", "kind")
PLAN_TO_RESULT = _histogram("plan_to_result_seconds", "From a plan's making to its result, with the wait.", _STEP)
CORE_STEP = _histogram("core_step_seconds", "The core's time for a turn that reads a step's result.", _CORE_STEP)

FRONTEND_METRICS = (
    *(PROMPT_TOKENS, GENERATION_TOKENS, SUCCESSES, REJECTIONS),
    *(FIRST_TOKEN, BETWEEN_TOKENS, PER_TOKEN, LATENCY, QUEUE_TIME, PREFILL_TIME, DECODE_TIME),
    *(REQUEST_PROMPT, REQUEST_OUTPUT, FAILURES, DISCARDED, RECOMPUTED, CHANGES_SURVIVED),
    *(CONSTRAINT_REFUSALS, TRIALS, TRIAL_KILLS),
)
"""In the order of a report (`MetricsReport.values`)."""
CORE_METRICS = (
    *(RUNNING, WAITING, KV_USAGE, CACHE_QUERIES, CACHE_HITS, PREEMPTIONS, STEP_TOKENS),
    *(NOT_SERVING, NOT_SERVING_SINCE, WORKERS, STANDBY_WORKERS, FRONTENDS, RESETS, DEATHS),
    *(STEP_SECONDS, PLAN_TO_RESULT, CORE_STEP),
)
METRICS = (*FRONTEND_METRICS, BACKLOG, TENANT_PROMPT, TENANT_OUTPUT, *CORE_METRICS)
"""All metrics of the page."""
NUM_CELLS = sum(metric.num_cells for metric in FRONTEND_METRICS)


class Histogram:
    """A bucket has the values above the bound before it, up to and with its own bound; the last one has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cells(self) -> list[float]:
        """The counts, then the sum."""
        return [*self.counts, self.sum]
