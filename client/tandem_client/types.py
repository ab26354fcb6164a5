"""The service's answers as frozen values, independent of protobuf.

Owns the names of their fields. Knows nothing of messages or calls.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from tandem_client.load_types import DrainProgress as DrainProgress
from tandem_client.load_types import DrainState as DrainState
from tandem_client.load_types import HeldPools as HeldPools
from tandem_client.load_types import Incidents as Incidents
from tandem_client.load_types import Load as Load
from tandem_client.load_types import UpdateProgress as UpdateProgress
from tandem_client.load_types import UpdateState as UpdateState
from tandem_client.load_types import WorkerLoad as WorkerLoad


class FinishReason(StrEnum):
    """Why a stream ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"
    # The model's length was reached before max_new_tokens.
    CONTEXT_FULL = "context_full"
    # A reason that is newer than this client.
    UNKNOWN = "unknown"


class AbortOutcome(StrEnum):
    """The outcome of an Abort for one id."""

    ABORTED = "aborted"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOffset:
    """How much of a sample was received: its token ids, and its characters of text. `stream.offsets` has them."""

    token_ids: int = 0
    text_chars: int = 0


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
class Sampling(SamplingDefaults):
    """The values of sampling options that are in force for a request."""

    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The service has accepted the request; tokens follow."""

    request_id: str
    sampling: Sampling
    prompt_tokens: int
    # The number in force; below the requested one if the model's length leaves fewer.
    max_new_tokens: int
    requests_ahead: int
    # Resumes the request; empty if it ends with its stream.
    resume_secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities at one token: before penalties, biases and temperature."""

    # The logprob of the token itself.
    logprob: float
    # The most probable token ids with their logprobs, in order; the token itself is not added to them.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """Logprobs of the prompt's tokens from position `start` on."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The new tokens of one sample, and new text, which may lag behind the tokens.

    Usually one token. Above some 5,000 tokens per second, a front end merges those of 15 to 20 ms into one delta, or
    more if it has too little CPU; first and last tokens are not delayed.
    """

    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    sample_idx: int = 0
    # One for each new token; empty if they were not requested.
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How one sample ended."""

    reason: FinishReason
    stop_token_id: int | None
    stop_string: str | None
    output_tokens: int
    sample_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The token counts of a request."""

    prompt_tokens: int
    output_tokens: int
    discarded_tokens: int
    recomputed_tokens: int
    # Prompt tokens that were found in the prefix cache and not computed.
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The durations of a request in seconds, and how often it was interrupted."""

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    worker_changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpan:
    """The output tokens of a sample from `from_token` to the next span were sampled with these weights."""

    from_token: int
    # Empty for the weights that the workers were started with.
    version: str
    sample_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last message of a stream, for all its samples together."""

    usage: Usage
    timing: Timing
    # Which weights computed the output; a sample without a span has those that the workers were started with.
    weights: tuple[WeightsSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The largest sizes and numbers of the caller's requests."""

    max_message_bytes: int
    # Headers of a call: 32 bytes for each, and its name and value.
    max_metadata_bytes: int
    max_prompt_tokens: int
    # Of a text; 0 without a tokenizer.
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
    # Of each: logit_bias, allowed_token_ids, banned_token_ids.
    max_listed_tokens: int
    max_time_seconds: float
    max_linger_seconds: float
    max_queue_seconds: float
    # Of one abort.
    max_abort_ids: int


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
    default_max_new_tokens: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedRequest:
    """A request that the service refuses for a time, because it killed its workers or made their steps fail."""

    # A hash of tenant, prompt and options.
    key: str
    # The id that it had when the service ended it.
    request_id: str
    # A hash of the tenant.
    tenant: str
    age_seconds: float
    # The time until the quarantine ends by itself.
    expires_seconds: float
    # What it did, in one sentence.
    cause: str
