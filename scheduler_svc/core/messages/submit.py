"""The events that bring a request to the core: a new one, its next reader, and one from the journal."""

from dataclasses import dataclass

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.ends import End, WeightsSpan

# The largest `Submit.sampling`: the lists of tokens that a front end takes make 94 kB at most.
MAX_SAMPLING_BYTES = 96 << 10
# The largest `Submit.description`: stop strings and stop tokens make 20 kB at most.
MAX_DESCRIPTION_BYTES = 32 << 10
SECRET_HASH_BYTES = 32
# The largest `Submit.constraint`.
MAX_CONSTRAINT_BYTES = 64 << 10
CONSTRAINT_HASH_BYTES = 32

# Sampling, stop tokens in any order, limits.
Options = tuple[bytes, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit:
    """A validated request. Its samples use the streams `stream` to `stream + num_samples - 1`, one each."""

    frontend: str
    stream: int
    request_id: str
    prompt: Int32Array
    """int32[n], n at least 1."""
    sampling: bytes
    """A serialized SamplingParams. The core passes it to the worker and does not parse it."""
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    priority: int
    """Requests of a higher priority go first (`queue/order.queue_key`)."""
    max_time_seconds: float
    """Time from this event after which the request ends with TIME_LIMIT. 0 for no limit."""
    deadline_seconds: float
    """Time from this event after which the request fails with DEADLINE. 0 for no deadline."""
    max_queue_seconds: float = 0.0
    """Time from this event after which the request fails with DEADLINE if it has had no row. 0 for no limit."""
    num_samples: int = 1
    num_logprobs: int = 0
    """0 for none, otherwise 1 + the number of alternatives for each output token."""
    prompt_logprobs_from: int = 0
    """The first stream gets prompt logprobs from this position on. 0 for none."""
    prefix_root: bytes = b""
    """32 bytes: the start of the request's page hashes (`page_hash`), which also identifies the tenant. If it is empty,
    the request shares no pages."""
    page_hashes: bytes = b""
    """32 bytes for each full page of the prompt, as far as the front end computed them."""
    cache_read: bool = True
    """Whether the request may use cached pages."""
    cache_write: bool = True
    """Whether the request's pages enter the prefix cache."""
    linger_seconds: float = 0.0
    """How long the request goes on without a reader, and its answer is kept after its end. 0: it ends with its
    reader."""
    secret_hash: bytes = b""
    """SHA-256 of the secret that resumes the request: 32 bytes. Empty if `linger_seconds` is 0."""
    description: bytes = b""
    """Bytes that the core keeps unread for the front end that resumes the request."""
    tenant: str = ""
    """Who pays; empty without a token file."""
    traceparent: str = ""
    """The caller's trace, for the flight recorder; the core does not read it."""
    constraint: bytes = b""
    """A grammar that the output matches; empty without one. The core passes it to workers and does not parse it."""
    constraint_hash: bytes = b""
    """SHA-256 of `constraint`: 32 bytes, or empty."""
    sampling_key: bytes = b""
    """Hash of `sampling` without the seed, which may be drawn anew each time. If it is empty, `sampling` counts."""

    @property
    def options(self) -> Options:
        """What identifies the request besides tenant and prompt: sampling and constraint, stop tokens, limits."""
        limits = (self.ignore_eos, self.max_new_tokens, self.min_new_tokens, self.num_logprobs)
        return (self.sampling_key or self.sampling) + self.constraint_hash, self.stop_token_ids, limits

    @property
    def streams(self) -> range:
        """The streams of the request, one per sample."""
        return range(self.stream, self.stream + self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A front end asks to become the reader of a request that lingers. The answer is Resumed or Rejected.

    The samples get the streams from `stream` on.
    """

    frontend: str
    stream: int
    request_id: str
    secret_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """A request that lingers, from the journal of an earlier process. It has no reader until it is resumed.

    It comes before the first worker joins. The core queues it when the first worker has been proven.
    """

    submit: Submit
    """As it came, but with an empty `frontend`. `stream` has no meaning."""
    outputs: tuple[Int32Array, ...]
    """The output tokens of each sample, as far as the journal has them."""
    ends: tuple[End | None, ...]
    """The end of each sample, None if it has not ended."""
    linger_seconds: float
    """Time from this event until the request is dropped if nobody resumes it."""
    weights: tuple[tuple[WeightsSpan, ...], ...] = ()
    """The spans by weights of each sample's output; empty: those that workers are started with."""
    suspects: tuple[int, ...] = ()
    """Indices of the samples that may have killed a worker."""
    identity: str = ""
    """Identity of the model that computed the outputs; empty if no worker had been proven. The request fails if another
    model is served."""
    age_seconds: float = 0.0
    """Time from the request's arrival to this event, which counts for its time limit and its deadline."""
