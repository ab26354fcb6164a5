"""Requests that no core has accepted, for tests of single modules."""

from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.state.request import Request

_SUBMIT = Submit(
    frontend="f",
    stream=1,
    request_id="r",
    prompt=np.zeros(1, np.int32),
    sampling=b"",
    max_new_tokens=4,
    min_new_tokens=0,
    stop_token_ids=(),
    ignore_eos=True,
    priority=0,
    max_time_seconds=0.0,
    deadline_seconds=0.0,
)


def bare_request(handle: int, *, virtual_start: int = 0, prompt_logprobs_from: int = 0, **submitted: Any) -> Request:
    """Returns a request of a Submit with the fields `submitted`."""
    submit = replace(_SUBMIT, stream=handle, request_id=f"r{handle}", **submitted)
    length = len(submit.prompt) + submit.max_new_tokens
    return Request(
        handle=handle,
        submit=submit,
        frontend=submit.frontend,
        stream=submit.stream,
        total_length=length,
        expected_length=length,
        arrived_at=0.0,
        virtual_start=virtual_start,
        prompt_logprobs_from=prompt_logprobs_from,
    )
