"""The served model, its limits and its defaults as frozen values. `types` has them, too."""

from dataclasses import dataclass


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
    # Of a chat, whose text counts in max_text_chars.
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
    # Why chats are refused, in one sentence; empty if they are served.
    chat_refusal: str = ""
    # The parts of a chat's answer that are parsed: "reasoning", "tool_calls". Others stay in the text.
    chat_parts: tuple[str, ...] = ()
    # Why constraints are refused, in one sentence; empty if they are served.
    constraint_refusal: str = ""
