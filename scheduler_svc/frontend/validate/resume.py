"""Owns the checks of what a request says about resuming, and of a Resume call. Every refusal is INVALID_ARGUMENT."""

from tandem.v1 import inference_pb2

from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes.limits import MAX_LINGER_SECONDS, MAX_SECRET_BYTES
from scheduler_svc.frontend.validate.checks import check_count, check_range, check_request_id, refuse


def check_linger(request: inference_pb2.GenerateRequest) -> float:
    """Returns the linger time in seconds, 0 for none. Raises Refusal."""
    seconds, output = request.resume.linger_seconds, request.output
    check_range("resume.linger_seconds", seconds, 0, MAX_LINGER_SECONDS)
    for name in ("logprobs", "prompt_logprobs_start"):
        if seconds and output.HasField(name):
            message = (
                f"resume.linger_seconds is {seconds:g} and output.{name} is set; logprobs are not kept for a caller "
                "that comes back, so only one of the two is possible"
            )
            raise status.invalid("resume.linger_seconds", message)
    return seconds


def check_resume(request: inference_pb2.ResumeRequest) -> None:
    """Checks what needs no knowledge of the resumed request. Raises Refusal."""
    if not request.request_id:
        raise status.invalid("request_id", "request_id is empty; an id is needed")
    check_request_id("request_id", request.request_id)
    if len(request.resume_secret) > MAX_SECRET_BYTES:
        refuse("resume_secret", f"{len(request.resume_secret)} bytes long", MAX_SECRET_BYTES)
    check_count("offsets", len(request.offsets), MAX_NUM_SAMPLES)


def check_offsets(offsets: list[inference_pb2.SampleOffset], num_tokens: list[int]) -> None:
    """Refuses offsets beyond the samples' `num_tokens` output tokens."""
    if len(offsets) > len(num_tokens):
        refuse("offsets", f"{len(offsets)} long", f"{len(num_tokens)}, the request's number of samples")
    for idx, (offset, count) in enumerate(zip(offsets, num_tokens, strict=False)):
        if offset.token_ids > count:
            refuse(f"offsets[{idx}].token_ids", offset.token_ids, f"{count}, the sample's number of tokens so far")
