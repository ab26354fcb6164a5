"""Owns the check of a request and its translation to the core's Submit. Knows nothing of streams or sockets.

Every refusal is INVALID_ARGUMENT (NOT_FOUND for an unknown model) and names the field, the number and the limit. The
module checks a request before its text is tokenized, and the prompt's length after that. It also hashes the prompt's
pages, because all requests share the core's one thread: 32,768 tokens in pages of 64 take 0.2 ms. The largest message
can hold millions of tokens, so hashing yields to the event loop after every 2,048 pages.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.core.messages.page_hash import HASH_BYTES, hash_pages, prefix_root
from scheduler_svc.door.tenant import Caller, CallerLimits
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import limits as bounds
from scheduler_svc.frontend.sizes.limits import MAX_LINGER_SECONDS, MAX_SECRET_BYTES
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from scheduler_svc.frontend.validate.checks import (
    check_above_zero,
    check_count,
    check_range,
    check_request_id,
    check_token_ids,
    refuse,
)
from scheduler_svc.frontend.validate.sampling import check_sampling

# Hashing this many pages takes about 1 ms.
PAGES_AT_ONCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request whose fields have been checked, except for the prompt's length."""

    request_id: str
    sampling: inference_pb2.SamplingParams
    stop: inference_pb2.StopParams
    stop_strings: tuple[str, ...]
    priority: int
    cache: inference_pb2.CacheParams
    want_text: bool
    want_token_ids: bool
    skip_special_tokens: bool
    # Number of most probable tokens to report beside each token; None means no logprobs.
    num_top: int | None
    # None means no logprobs of the prompt.
    prompt_logprobs_start: int | None
    # Whether logprobs have the pieces of text of their tokens.
    logprob_pieces: bool
    # 0: the request ends with its stream.
    linger_seconds: float
    max_queue_seconds: float  # 0: no limit


def check_request(request: inference_pb2.GenerateRequest, model: Model, limits: CallerLimits) -> Checked:
    """Checks all fields except the prompt. Raises Refusal."""
    model.check_name(request.model)
    check_range("priority", request.priority, limits.min_priority, limits.max_priority)
    _check_max_new_tokens(request.stop, limits)
    check_range("max_queue_seconds", request.max_queue_seconds, 0, bounds.MAX_QUEUE_SECONDS)
    if len(request.cache.salt) > bounds.MAX_SALT_CHARS:
        refuse("cache.salt", f"{len(request.cache.salt)} characters long", bounds.MAX_SALT_CHARS)
    stop_strings = _check_stop(request.stop, model)
    output = request.output
    return Checked(
        request_id=_check_request_id(request.request_id),
        sampling=check_sampling(request.sampling, request.stop, model),
        stop=request.stop,
        stop_strings=stop_strings,
        priority=request.priority,
        cache=request.cache,
        want_text=_check_want_text(output, model),
        want_token_ids=not output.HasField("want_token_ids") or output.want_token_ids,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
        num_top=_check_logprobs(output, model),
        prompt_logprobs_start=output.prompt_logprobs_start if output.HasField("prompt_logprobs_start") else None,
        logprob_pieces=_check_pieces(output, model),
        linger_seconds=check_linger(request),
        max_queue_seconds=request.max_queue_seconds,
    )


async def make_submit(
    checked: Checked, token_ids: Sequence[int], model: Model, who: Caller, *, deadline_seconds: float
) -> frontend_pb2.Submit:
    """Returns the core's Submit, without its stream. `deadline_seconds` is 0 if there is no deadline.

    Raises Refusal if the lengths do not fit, before it hashes anything.
    """
    stop, sampling = checked.stop, checked.sampling
    max_new_tokens = _max_new_tokens(stop, len(token_ids), model, who.limits)
    most = new_tokens_in_force(max_new_tokens, len(token_ids), model)
    if stop.min_new_tokens > most:
        refuse("stop.min_new_tokens", stop.min_new_tokens, f"max_new_tokens, here {most}")
    prompt = np.asarray(token_ids, dtype="<i4")
    root = prefix_root(model.cache_root, checked.cache.salt, who.tenant)
    return frontend_pb2.Submit(
        request_id=checked.request_id,
        prompt=prompt.tobytes(),
        max_new_tokens=max_new_tokens,
        min_new_tokens=stop.min_new_tokens,
        # Deterministic, so that equal requests make equal bytes: the order of a map's entries is fixed.
        sampling=sampling.SerializeToString(deterministic=True),
        stop_token_ids=np.asarray(list(dict.fromkeys(stop.stop_token_ids)), dtype="<i4").tobytes(),
        ignore_eos=stop.ignore_eos,
        priority=checked.priority,
        max_time_seconds=stop.max_time_seconds,
        deadline_seconds=deadline_seconds,
        max_queue_seconds=checked.max_queue_seconds,
        num_samples=sampling.num_samples,
        num_logprobs=0 if checked.num_top is None else 1 + checked.num_top,
        prompt_logprobs_from=_prompt_logprobs_from(checked.prompt_logprobs_start, len(token_ids)),
        prefix_root=root,
        page_hashes=await _hash_pages(root, prompt, model.info.page_size),
        bypass_read=checked.cache.bypass_read,
        bypass_write=checked.cache.bypass_write,
        tenant=who.tenant,
    )


async def _hash_pages(root: bytes, prompt: Int32Array, page_size: int) -> bytes:
    parts, parent, num_at_once = list[bytes](), root, PAGES_AT_ONCE * page_size
    for start in range(0, len(prompt), num_at_once):
        if parts:
            await asyncio.sleep(0)
            parent = parts[-1][-HASH_BYTES:]
        parts.append(hash_pages(parent, prompt[start : start + num_at_once], page_size))
    return b"".join(parts)


def new_tokens_in_force(max_new_tokens: int, num_prompt: int, model: Model) -> int:
    """Returns the largest number of output tokens of a stream: max_new_tokens, or what the model's length leaves."""
    return min(max_new_tokens, model.max_length - num_prompt)


def _check_request_id(request_id: str) -> str:
    check_request_id("request_id", request_id)
    return request_id or uuid.uuid4().hex


def _check_stop(stop: inference_pb2.StopParams, model: Model) -> tuple[str, ...]:
    if stop.HasField("max_new_tokens") and stop.max_new_tokens == 0:
        raise status.invalid("stop.max_new_tokens", "stop.max_new_tokens is 0; it must be at least 1")
    if stop.max_new_tokens > bounds.MAX_NEW_TOKENS:
        refuse("stop.max_new_tokens", stop.max_new_tokens, bounds.MAX_NEW_TOKENS)
    if stop.HasField("max_time_seconds"):
        check_above_zero("stop.max_time_seconds", stop.max_time_seconds, bounds.MAX_TIME_SECONDS)
    check_count("stop.stop_token_ids", len(stop.stop_token_ids), bounds.MAX_STOP_TOKEN_IDS)
    if stop.stop_token_ids:
        check_token_ids("stop.stop_token_ids", stop.stop_token_ids, model)
    check_count("stop.stop_strings", len(stop.stop_strings), bounds.MAX_STOP_STRINGS)
    for idx, string in enumerate(stop.stop_strings):
        field = f"stop.stop_strings[{idx}]"
        if not string:
            raise status.invalid(field, f"{field} is empty; at least 1 character is needed")
        if len(string) > bounds.MAX_STOP_STRING_CHARS:
            refuse(field, f"{len(string)} characters long", bounds.MAX_STOP_STRING_CHARS)
    if stop.stop_strings and model.tokenizer is None:
        message = "stop.stop_strings needs a tokenizer, and the served model has none"
        raise status.invalid("stop.stop_strings", message)
    return tuple(dict.fromkeys(stop.stop_strings))


def _check_want_text(output: inference_pb2.OutputParams, model: Model) -> bool:
    if model.tokenizer is None and output.want_text:
        message = "output.want_text is true, and the served model came without a tokenizer"
        raise status.invalid("output.want_text", message)
    return model.tokenizer is not None and (not output.HasField("want_text") or output.want_text)


def _check_logprobs(output: inference_pb2.OutputParams, model: Model) -> int | None:
    if not output.HasField("logprobs"):
        return None
    check_range("output.logprobs", output.logprobs, 0, model.info.max_logprobs)
    return output.logprobs


def _check_pieces(output: inference_pb2.OutputParams, model: Model) -> bool:
    if output.logprob_pieces and not (output.HasField("logprobs") or output.HasField("prompt_logprobs_start")):
        message = "output.logprob_pieces is true, and neither output.logprobs nor output.prompt_logprobs_start is set"
        raise status.invalid("output.logprob_pieces", message)
    return output.logprob_pieces and model.tokenizer is not None


def _prompt_logprobs_from(start: int | None, num_prompt: int) -> int:
    """Returns the first position to report. Position 0 has no logprob, so 0 becomes 1. Returns 0 if there is none."""
    field = "output.prompt_logprobs_start"
    if start is None:
        return 0
    if start >= num_prompt:
        refuse(field, start, f"{num_prompt - 1} (the prompt has {num_prompt} tokens)")
    return max(1, start) if num_prompt > 1 else 0


def _check_max_new_tokens(stop: inference_pb2.StopParams, limits: CallerLimits) -> None:
    limit = limits.max_new_tokens
    if limit is not None and stop.max_new_tokens > limit:
        refuse("stop.max_new_tokens", stop.max_new_tokens, f"{limit}, the caller's own")


def _max_new_tokens(stop: inference_pb2.StopParams, num_prompt: int, model: Model, limits: CallerLimits) -> int:
    max_length = model.max_length
    if num_prompt >= max_length:
        message = (
            f"prompt has {num_prompt} tokens; the limit is {max_length - 1}"
            f" (max_length {max_length}, less one new token)"
        )
        raise status.invalid("prompt", message)
    if stop.HasField("max_new_tokens"):
        # If more are asked for than fit, the core ends the stream with CONTEXT_FULL. The exact number does not matter.
        return min(stop.max_new_tokens, max_length)
    # The default is what fits the present workers. A longer prompt is measured against the recently lost ones.
    num_left = (model.info.max_length if num_prompt < model.info.max_length else max_length) - num_prompt
    default = model.info.default_max_new_tokens
    return max(1, min(default if limits.max_new_tokens is None else min(default, limits.max_new_tokens), num_left))


def check_detokenize(request: inference_pb2.DetokenizeRequest, model: Model) -> Tokenizer:
    """Checks a Detokenize request and returns the tokenizer. Raises Refusal."""
    if model.tokenizer is None:
        raise status.invalid("token_ids", "token_ids need a tokenizer, and the served model has none")
    check_count("token_ids", len(request.token_ids), model.max_length)
    check_token_ids("token_ids", request.token_ids, model)
    return model.tokenizer


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
