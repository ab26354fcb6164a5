"""Requests that no core has accepted, for tests of single modules."""

from typing import Any

from scheduler_svc.core.state.request import Request
from tests.rigs.core_events import submit


def bare_request(handle: int, *, virtual_start: int = 0, prompt_logprobs_from: int = 0, **submitted: Any) -> Request:
    """Returns a request of a Submit with the fields `submitted`."""
    event = submit(handle, **{"prompt": [0], **submitted})
    length = len(event.prompt) + event.max_new_tokens
    return Request(
        handle=handle,
        submit=event,
        frontend=event.frontend,
        stream=event.stream,
        total_length=length,
        expected_length=length,
        arrived_at=0.0,
        virtual_start=virtual_start,
        prompt_logprobs_from=prompt_logprobs_from,
    )
