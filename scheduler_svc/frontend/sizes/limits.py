"""Owns the numbers that bound what a caller may send, except for those of sampling (`sampling_limits.py`)."""

from dataclasses import dataclass

MAX_REQUEST_ID_CHARS = 128
# A model's name may be the path of its folder.
MAX_MODEL_NAME_CHARS = 4096
MAX_SALT_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
# The largest int32, with which callers ask for all that fits.
MAX_NEW_TOKENS = 2**31 - 1
# One week.
MAX_TIME_SECONDS = 604_800
MAX_QUEUE_SECONDS = 86_400
MAX_BIAS = 100
# Of each list: biased, allowed, banned.
MAX_LISTED_TOKENS = 4096
MAX_LINGER_SECONDS = 600
# A secret has 32 bytes. A wrong one has the answer of an unknown request.
MAX_SECRET_BYTES = 1024
MAX_CHAT_MESSAGES = 1024
MAX_CHAT_TOOLS = 128
# Names of arguments of a template.
MAX_CHAT_ARGS = 64
# Of all messages together.
MAX_CHAT_PARTS = 4096
MAX_CHAT_CALLS = 1024
MAX_TOOL_NAME_CHARS = 128
MAX_ABORT_IDS = 1024
# With room for tags and lengths.
MAX_ABORT_BYTES = MAX_ABORT_IDS * (4 + 4 * MAX_REQUEST_ID_CHARS)
# Of a constraint, in bytes, and of its list of choices.
MAX_CONSTRAINT_BYTES = 65_536
MAX_CHOICES = 1_024
MAX_CHOICE_CHARS = 4_096
MAX_QUARANTINE_KEYS = 16
QUARANTINE_KEY_CHARS = 64
MAX_SERVICE_NAME_CHARS = 200
MAX_WORKER_NAME_CHARS = 256
MAX_DRAIN_SECONDS = 86_400
MAX_VERSION_CHARS = 128
MAX_FOLDER_CHARS = 4096
MAX_UPDATE_SECONDS = 86_400
# The most bytes of a character in UTF-8.
MAX_CHAR_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What follows from the served model. Without a model nothing is allowed."""

    prompt_tokens: int = 0
    text_chars: int = 0
    """Of a text that may fit the longest sequence; 0 without a tokenizer."""
    length: int = 0
    """Tokens of the longest sequence."""
    vocabulary: int = 0
    samples: int = 0
    """Of one request."""
    logprobs: int = 0
    """Alternatives beside each token."""
