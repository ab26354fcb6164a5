"""Owns the bounds of one front end's streams, and the decision to drop a reader. Knows nothing of their content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """The bounds of one front end's streams."""

    # Samples of all requests, plus finished calls with unread answers.
    max_streams: int = 8192
    # A reader is dropped if a write has been blocked for `stall_seconds` and more than `max_stalled_bytes` are pending,
    stall_seconds: float = 30.0
    max_stalled_bytes: int = 16_384
    # or if a write has been blocked for this long, with any number of bytes pending,
    max_stall_seconds: float = 300.0
    # or if more bytes than this are pending while a write is blocked, for any time.
    max_pending_bytes: int = 64 * 1024 * 1024
    # Under load, the tokens of a stream wait for this time, so that one message carries several. The rest of the 20 ms
    # that callers are promised is for the messages of other streams that are due at the same time.
    merge_seconds: float = 0.015
    # The load from which tokens are merged. A message costs about 40 us of CPU, so this is a fifth of a core.
    busy_tokens_per_second: float = 5000.0
    # Under load, arriving tokens are passed to their streams together, this often.
    sort_seconds: float = 0.006
    # Streams whose messages are made in one turn of the event loop, some 0.8 ms of work, so that a first token or a new
    # output of the core waits no longer. The messages of a turn to one connection are one packet.
    streams_per_turn: int = 16

    def stall(self, blocked_seconds: float, num_bytes: int) -> str:
        """Why the reader of a write that has been blocked for this time is dropped; empty if it is kept."""
        if num_bytes <= self.max_pending_bytes:
            is_full = num_bytes > self.max_stalled_bytes
            if blocked_seconds < (self.stall_seconds if is_full else self.max_stall_seconds):
                return ""
        return (
            f"the reader has read nothing for {blocked_seconds:.0f} s and {num_bytes} bytes are pending;"
            f" the limits are {self.stall_seconds:g} s with {self.max_stalled_bytes} bytes,"
            f" {self.max_stall_seconds:g} s, and {self.max_pending_bytes} bytes"
        )
