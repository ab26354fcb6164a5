"""Owns what GetModelInfo tells of the limits of requests."""

from tandem.v1 import control_pb2

from scheduler_svc.door.tenant import CallerLimits
from scheduler_svc.frontend.rpc.options import MAX_METADATA_BYTES
from scheduler_svc.frontend.sizes import limits as n


def told(sizes: n.Sizes, caller: CallerLimits, *, max_message_bytes: int) -> control_pb2.RequestLimits:
    """Returns the limits of a caller's requests to the served model."""
    return control_pb2.RequestLimits(
        max_message_bytes=max_message_bytes,
        max_metadata_bytes=MAX_METADATA_BYTES,
        max_prompt_tokens=sizes.prompt_tokens,
        max_text_chars=sizes.text_chars,
        max_new_tokens=caller.max_new_tokens,
        min_priority=caller.min_priority,
        max_priority=caller.max_priority,
        max_request_id_chars=n.MAX_REQUEST_ID_CHARS,
        max_salt_chars=n.MAX_SALT_CHARS,
        max_stop_strings=n.MAX_STOP_STRINGS,
        max_stop_string_chars=n.MAX_STOP_STRING_CHARS,
        max_stop_token_ids=n.MAX_STOP_TOKEN_IDS,
        max_listed_tokens=n.MAX_LISTED_TOKENS,
        max_time_seconds=n.MAX_TIME_SECONDS,
        max_queue_seconds=n.MAX_QUEUE_SECONDS,
        max_linger_seconds=n.MAX_LINGER_SECONDS,
        max_abort_ids=n.MAX_ABORT_IDS,
        max_constraint_bytes=n.MAX_CONSTRAINT_BYTES,
        max_chat_messages=n.MAX_CHAT_MESSAGES,
        max_chat_tools=n.MAX_CHAT_TOOLS,
    )
