"""The rate of an answer, for the figures of chats, completions and the demo."""

# Between the first delta and the last one. What takes less came at once, and its rate is that of a network.
_LEAST_SECONDS = 0.05


def rate_of(num_tokens: int, seconds: float) -> float | None:
    """Tokens per second of the `num_tokens` after the first delta, the last of which came `seconds` after it.

    None if they do not give a rate: a rate needs two moments, and a time that is worth measuring.
    """
    return num_tokens / seconds if num_tokens > 0 and seconds >= _LEAST_SECONDS else None
