"""The control service's answers as frozen values: model, load, what an operator started. `types` has them, too."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values of sampling options that a request leaves unset."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The largest sizes and numbers of the caller's requests."""

    max_message_bytes: int
    # Headers of a call: 32 bytes for each, and its name and value.
    max_metadata_bytes: int
    max_prompt_tokens: int
    # The longest text; 0 without a tokenizer.
    max_text_chars: int
    # The caller's own limit; None if the model's length alone limits it.
    max_new_tokens: int | None
    min_priority: int
    max_priority: int
    max_request_id_chars: int
    max_salt_chars: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_stop_token_ids: int
    # The longest logit_bias, allowed_token_ids and banned_token_ids, each.
    max_listed_tokens: int
    max_time_seconds: float
    max_linger_seconds: float
    max_queue_seconds: float
    # The most ids of one abort.
    max_abort_ids: int
    # Limits of a chat; its text counts in max_text_chars.
    max_chat_messages: int
    max_chat_tools: int
    max_constraint_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model, its limits and default settings."""

    model: str
    identity: str
    vocab_size: int
    max_length: int
    page_size: int
    num_pages: int
    max_rows: int
    token_budget: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    # What an unset max_new_tokens stands for; None: the rest of the context.
    default_max_new_tokens: int | None
    max_waiting: int
    has_tokenizer: bool
    max_num_samples: int
    max_logprobs: int
    # Each token attends to this many tokens up to itself; 0 means all.
    window: int
    # The first tokens of a sequence, to which every token attends besides its window.
    sink_tokens: int
    # None if the service is older than these limits.
    limits: RequestLimits | None
    # Why chats are refused, in one sentence; empty if they are served.
    chat_refusal: str = ""
    # The parts of a chat's answer that are parsed: "reasoning", "tool_calls". Others stay in the text.
    chat_parts: tuple[str, ...] = ()
    # Why constraints are refused, in one sentence; empty if they are served.
    constraint_refusal: str = ""


class WaitReason(StrEnum):
    """Why no request is computed (the first nine), or why one request waits; inference.proto says more of each."""

    NO_WORKER = "no_worker"
    WORKER_LOST = "worker_lost"
    WORKER_STARTING = "worker_starting"
    ON_STANDBY = "on_standby"
    LOADING_WEIGHTS = "loading_weights"
    WEIGHTS_REFUSED = "weights_refused"
    WORKERS_LEAVING = "workers_leaving"
    CRASH_LOOP = "crash_loop"
    SHUTTING_DOWN = "shutting_down"
    NO_LARGE_WORKER = "no_large_worker"
    SUSPECT = "suspect"
    CONSTRAINT = "constraint"
    TENANT_SHARE = "tenant_share"
    PREEMPTED = "preempted"
    QUEUE = "queue"
    SLOW_STEP = "slow_step"
    # It waits no more, and its prompt and output so far are computed before the next token.
    COMPUTING = "computing"
    # A reason that is newer than this client.
    UNKNOWN = "unknown"


class WorkerState(StrEnum):
    """What a worker does. Only the first state takes requests."""

    SERVING = "serving"
    STANDBY = "standby"
    STARTING = "starting"
    LOADING = "loading"
    # It cannot load the service's weights, and tries again.
    REFUSED = "refused"
    DRAINING = "draining"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load of one worker."""

    pid: int
    running: int
    pages_used: int
    pages_cached: int
    pages_total: int
    # A text such as "cpu" or "cuda:0 NVIDIA H200".
    device: str
    # Whether the worker waits without requests until a serving worker is lost.
    is_standby: bool
    # What `Client.drain` takes; a worker that joins again has another name.
    name: str = ""
    is_draining: bool = False
    # The version of its weights; empty for those that it was started with.
    weights_version: str = ""
    state: WorkerState = WorkerState.UNKNOWN
    # What is wrong, in the worker's own words; otherwise empty.
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """Counts since the service started: hung workers, and what followed steps that ran out of memory."""

    hung_workers: int
    # The next steps were smaller, had fewer rows, or had one request; or that request ended; or the worker was refused.
    smaller_steps: int
    fewer_rows: int
    alone: int
    ended_for_memory: int
    workers_refused_for_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPools:
    """Pools of keys and values in memory that outlives their workers."""

    # Those of lost workers that no worker has taken over yet, their cached pages, and the size of their memory.
    pools: int
    pages: int
    bytes: int
    # Since the service started: pools that workers have taken over, and the cached and the damaged pages in them.
    taken_over: int
    pages_kept: int
    damaged_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The service's load: requests, pages and workers; and whether it serves."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    workers: int
    steps: int
    step_ms: float
    preemptions: int
    lane_resets: int
    output_tokens: int
    worker_pid: int
    # Pages that are in the prefix cache and not in use.
    pages_cached: int
    # Prompt tokens of all requests since the service started, and those found in the prefix cache.
    prompt_tokens: int
    cached_prompt_tokens: int
    # Pages in the host memory of workers.
    host_pages_used: int
    host_pages_total: int
    per_worker: tuple[WorkerLoad, ...]
    # One sentence why a request that arrives now is not computed; empty while it is.
    not_serving: str
    # Seconds since a worker was last lost, and why; None and empty if none was lost.
    worker_lost_seconds: float | None
    worker_lost_reason: str
    # Requests that may have killed a worker.
    suspects: int
    # Workers on standby; `workers` does not count them, `per_worker` lists them last.
    standby_workers: int
    incidents: Incidents
    held_pools: HeldPools
    # Size of the scheduler's journal, 0 without one; and why it cannot be written at the moment, otherwise empty.
    journal_bytes: int
    journal_suspended: str
    # The version of the last update of weights; empty without one.
    weights_version: str = ""
    # The reason of `not_serving`, and since when no request is computed, in Unix time; None while requests are.
    not_serving_reason: WaitReason | None = None
    not_serving_since: float | None = None

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache; 0 before the first prompt."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class RequestState(StrEnum):
    """Where a request is: without a place on a worker, with one, or ended with its answer kept for `resume`."""

    WAITING = "waiting"
    RUNNING = "running"
    KEPT = "kept"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRequest:
    """One sample of a request that waits or runs, or has a kept answer."""

    # As its caller knows it.
    request_id: str
    # Empty without a token file.
    tenant: str
    # What `abort` of this client takes.
    abort_id: str
    state: RequestState
    # Why it makes no progress; None and empty while it does.
    wait_reason: WaitReason | None
    wait_message: str
    # Since it was accepted.
    age_seconds: float
    prompt_tokens: int
    # The output so far, and at most; the latter is 0 if it is kept.
    output_tokens: int
    max_new_tokens: int
    priority: int
    # An abort ends all samples.
    sample_idx: int
    num_samples: int
    # `WorkerLoad.name`; empty while it waits.
    worker: str
    weights_version: str
    # Whether no stream reads it, so that it ends unless its caller resumes it.
    is_detached: bool
    # The time after which it ends, or its answer is given up; None without a limit.
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPage:
    """A part of the list of requests, those accepted first before others."""

    requests: tuple[ListedRequest, ...]
    # Empty if no others follow.
    next_page_token: str


class DrainState(StrEnum):
    """The state of a drain; the last three known ones are final."""

    DRAINING = "draining"
    LEAVING = "leaving"
    DONE = "done"
    TIME_LIMIT = "time_limit"
    WORKER_LOST = "worker_lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """The progress of a drain."""

    # Empty for the service.
    worker: str
    state: DrainState
    # Requests of the service.
    running: int
    waiting: int
    # Requests that still run on the worker.
    worker_running: int
    # The largest number of tokens that the requests of the worker, or of the service, may still produce; at most 256 of
    # a request that left max_new_tokens unset.
    tokens_left: int
    # Requests that were moved to other workers.
    moved: int
    # Since the drain began.
    seconds: float
    # One sentence.
    detail: str


class UpdateState(StrEnum):
    """The state of an update of weights; all known ones but the first are final."""

    UPDATING = "updating"
    DONE = "done"
    # The first worker refused the folder, or two were lost while they loaded it; nothing has changed.
    REFUSED = "refused"
    TIME_LIMIT = "time_limit"
    # Some workers could not load the weights; they try again.
    INCOMPLETE = "incomplete"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProgress:
    """The progress of an update of weights."""

    version: str
    state: UpdateState
    # Connected workers, and how many of them have the new weights.
    workers: int
    workers_updated: int
    # Requests of the service.
    running: int
    waiting: int
    # Since the update began.
    seconds: float
    # One sentence.
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedRequest:
    """A request that the service refuses for a time, because it killed its workers or made their steps fail."""

    # A hash of tenant, salt, prompt and options.
    key: str
    # The id that it had when the service ended it.
    request_id: str
    # A hash of tenant and salt.
    tenant: str
    age_seconds: float
    # The time until the quarantine ends by itself.
    expires_seconds: float
    # What it did, in one sentence.
    cause: str
