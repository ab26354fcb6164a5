"""Owns the check of a request and its translation to the core's Submit. Knows nothing of streams or sockets.

Every refusal is INVALID_ARGUMENT (NOT_FOUND for an unknown model) and names the field, the number and the limit. The
module checks a request before its text is tokenized, and the prompt's length after that. It also hashes the prompt's
pages, because all requests share the core's one thread. The largest message can hold millions of tokens, so hashing
yields to the event loop after every 2,048 pages.

Sampling settings become the complete SamplingParams that travels to the worker: the core passes the bytes on unread,
and the worker parses them (`gpu_worker/wire/started.py`).
"""

import asyncio
import secrets
import uuid
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.page_hash import HASH_BYTES, hash_pages, prefix_root
from scheduler_svc.door.tenant import Caller, CallerLimits
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import Check, check_range, refuse, wrong
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tandem_contract.limits import limit_at, limit_of
from tandem_contract.plural import numbered

# Hashing this many pages takes about 1 ms.
PAGES_AT_ONCE = 2048
# Without what `prompt.py` and `constraints/` check, and sampling, which is checked with the model's defaults.
_check_request = Check(pb.GenerateRequest, without=("token_ids", "chat", "sampling", "constraint"))
_check_sampling = Check(pb.SamplingParams, "sampling.")
_check_resume, _check_detokenize = Check(pb.ResumeRequest), Check(pb.DetokenizeRequest)
_BIAS = limit_at(pb.SamplingParams, "logit_bias")
# Fields that the first workers do not know, with the values that change nothing: sent to them, they fail a plan.
_LATER_FIELDS = {field.name: limit_of(field).off for field in pb.SamplingParams.DESCRIPTOR.fields if field.number > 13}


def check_token_ids(field: str, token_ids: Sequence[int], model: Model) -> None:
    """Refuses an empty list, and ids outside the vocabulary."""
    if not token_ids:
        raise wrong(field, "is empty; at least 1 token is needed")
    # 0.2 ms for a million ids, while max() would block the event loop for 35 ms.
    is_beyond = np.asarray(token_ids) >= model.info.vocab_size
    if is_beyond.any():
        idx = int(is_beyond.argmax())
        raise wrong(
            f"{field}[{idx}]", f"is {token_ids[idx]}; the vocabulary has {numbered(model.info.vocab_size, 'token')}"
        )


def check_request_id(field: str, request_id: str) -> None:
    """Refuses ids with characters that are not printable."""
    if not request_id.isprintable():
        idx = next(i for i, char in enumerate(request_id) if not char.isprintable())
        code = f"U+{ord(request_id[idx]):04X}"
        raise wrong(field, f"has {code} at character {idx}; only printable characters are allowed")


def check_sampling(asked: pb.SamplingParams, stop: pb.StopParams, model: Model) -> pb.SamplingParams:
    """Returns the settings over the model's defaults, every scalar set, so a worker needs none. Raises Refusal."""
    sampling = pb.SamplingParams()
    sampling.CopyFrom(model.info.sampling_defaults)
    sampling.MergeFrom(asked)
    _check_sampling(sampling, model.sizes)
    if asked.banned_token_ids:
        check_token_ids("sampling.banned_token_ids", asked.banned_token_ids, model)
    if asked.HasField("allowed_token_ids"):
        check_token_ids("sampling.allowed_token_ids.ids", asked.allowed_token_ids.ids, model)
    banned, allowed = frozenset(asked.banned_token_ids), frozenset(asked.allowed_token_ids.ids)
    silent_at_first = frozenset(stop.stop_token_ids) | (frozenset[int]() if stop.ignore_eos else model.eos_token_ids)
    _check_one_remains(allowed, banned, silent_at_first if stop.min_new_tokens else frozenset(), model)
    for token in _check_biases(asked, model):
        del sampling.logit_bias[token]
    if not asked.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    if sampling.top_p == 0:
        # If no tokens reach the probability, only the most probable one is kept.
        sampling.temperature, sampling.top_p = 0, 1
    return sampling


def without_lists(sampling: pb.SamplingParams) -> pb.SamplingParams:
    """Returns the scalars alone, which is what Accepted reports."""
    scalars = pb.SamplingParams()
    scalars.CopyFrom(sampling)
    for field in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        scalars.ClearField(field)
    return scalars


def _check_biases(asked: pb.SamplingParams, model: Model) -> list[int]:
    """Checks the biases. Returns the tokens with bias 0, which has no effect."""
    count = len(asked.logit_bias)
    tokens = np.fromiter(asked.logit_bias.keys(), np.int64, count)
    biases = np.fromiter(asked.logit_bias.values(), np.float32, count)
    # A NaN is outside every range.
    is_bad = (tokens >= model.info.vocab_size) | ~((biases >= _BIAS.least) & (biases <= _BIAS.most))
    if is_bad.any():
        token = int(tokens[is_bad].min())
        field = f"sampling.logit_bias[{token}]"
        if token >= model.info.vocab_size:
            raise wrong(field, f"is for token {token}; the vocabulary has {numbered(model.info.vocab_size, 'token')}")
        check_range(field, asked.logit_bias[token], _BIAS.least, int(_BIAS.most))
    return tokens[biases == 0].tolist()


def _check_one_remains(allowed: Set[int], banned: Set[int], silent_at_first: Set[int], model: Model) -> None:
    """Refuses lists that leave no token to sample, also before min_new_tokens, while stop tokens are banned."""
    if allowed:
        field, many = (
            "sampling.allowed_token_ids",
            f"sampling.allowed_token_ids has {numbered(len(allowed), 'token')}",
        )
        num_drawable, num_at_first = len(allowed - banned), len(allowed - banned - silent_at_first)
    else:
        field, many = "sampling.banned_token_ids", f"the vocabulary has {numbered(model.info.vocab_size, 'token')}"
        num_drawable = model.info.vocab_size - len(banned)
        num_at_first = model.info.vocab_size - len(banned | silent_at_first)
    if not num_drawable:
        raise status.invalid(field, f"{many}, and sampling.banned_token_ids bans them all; 1 must remain")
    if not num_at_first:
        why = "before stop.min_new_tokens, until which end-of-sequence and stop tokens are banned"
        raise status.invalid(field, f"{many}, and none of them may be sampled {why}; 1 must remain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request with checked fields, except for the prompt's length."""

    request: pb.GenerateRequest
    # The caller's, or a new one.
    request_id: str
    # With the model's defaults.
    sampling: pb.SamplingParams
    want_text: bool


def check_request(request: pb.GenerateRequest, model: Model, limits: CallerLimits) -> Checked:
    """Checks all fields except the prompt. Raises Refusal."""
    model.check_name(request.model)
    check_range("priority", request.priority, limits.min_priority, limits.max_priority)
    if (limit := limits.max_new_tokens) is not None and request.stop.max_new_tokens > limit:
        refuse("stop.max_new_tokens", f"is {request.stop.max_new_tokens}", f"{limit}, the caller's own")
    _check_request(request, model.sizes)
    _check_stop(request.stop, model)
    check_request_id("request_id", request.request_id)
    sampling, output = check_sampling(request.sampling, request.stop, model), request.output
    _check_output(output, model)
    _check_linger(request)
    return Checked(
        request=request,
        request_id=request.request_id or uuid.uuid4().hex,
        sampling=sampling,
        want_text=model.tokenizer is not None and (not output.HasField("want_text") or output.want_text),
    )


async def make_submit(
    checked: Checked, token_ids: Sequence[int], model: Model, who: Caller, *, deadline_seconds: float
) -> frontend_pb2.Submit:
    """Returns the core's Submit, without its stream. `deadline_seconds` is 0 without a deadline.

    Raises Refusal if the lengths do not fit, before it hashes anything.
    """
    request, sampling = checked.request, checked.sampling
    stop, cache, output = request.stop, request.cache, request.output
    max_new_tokens, is_max_set = maximum_of(stop, len(token_ids), model, who.limits)
    most = new_tokens_in_force(max_new_tokens, len(token_ids), model)
    if stop.min_new_tokens > most:
        refuse("stop.min_new_tokens", f"is {stop.min_new_tokens}", f"max_new_tokens, here {most}")
    prompt = np.asarray(token_ids, dtype="<i4")
    root = prefix_root(model.cache_root, cache.salt, who.tenant)
    return frontend_pb2.Submit(
        request_id=checked.request_id,
        prompt=prompt.tobytes(),
        max_new_tokens=max_new_tokens,
        is_max_unset=not is_max_set,
        min_new_tokens=stop.min_new_tokens,
        sampling=_for_workers(sampling),
        stop_token_ids=np.asarray(list(dict.fromkeys(stop.stop_token_ids)), dtype="<i4").tobytes(),
        ignore_eos=stop.ignore_eos,
        priority=request.priority,
        max_time_seconds=stop.max_time_seconds,
        deadline_seconds=deadline_seconds,
        max_queue_seconds=request.max_queue_seconds,
        num_samples=sampling.num_samples,
        num_logprobs=1 + output.logprobs if output.HasField("logprobs") else 0,
        prompt_logprobs_from=_prompt_logprobs_from(output, len(token_ids)),
        prefix_root=root,
        page_hashes=await _hash_pages(root, prompt, model.info.page_size),
        bypass_read=cache.bypass_read,
        bypass_write=cache.bypass_write,
        tenant=who.tenant,
    )


def _for_workers(sampling: pb.SamplingParams) -> bytes:
    """Returns what travels. It is deterministic: equal requests make equal bytes, with a map's entries in one order."""
    sent = pb.SamplingParams()
    sent.CopyFrom(sampling)
    for name, off in _LATER_FIELDS.items():
        if getattr(sent, name) == off:
            sent.ClearField(cast(Any, name))
    return sent.SerializeToString(deterministic=True)


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
    return min(max_new_tokens, model.sizes.length - num_prompt)


def _check_stop(stop: pb.StopParams, model: Model) -> None:
    if stop.stop_token_ids:
        check_token_ids("stop.stop_token_ids", stop.stop_token_ids, model)
    if "" in stop.stop_strings:
        idx = list(stop.stop_strings).index("")
        raise wrong(f"stop.stop_strings[{idx}]", "is empty; at least 1 character is needed")
    if stop.stop_strings and model.tokenizer is None:
        raise wrong("stop.stop_strings", "needs a tokenizer, and the served model has none")


def _check_output(output: pb.OutputParams, model: Model) -> None:
    if model.tokenizer is None and output.want_text:
        raise wrong("output.want_text", "is true, and the served model came without a tokenizer")
    if output.logprob_pieces and not (output.HasField("logprobs") or output.HasField("prompt_logprobs_start")):
        what = "is true, and neither output.logprobs nor output.prompt_logprobs_start is set"
        raise wrong("output.logprob_pieces", what)


def _prompt_logprobs_from(output: pb.OutputParams, num_prompt: int) -> int:
    """Returns the first position to report, 0 without one. Position 0 has no logprob, so 0 becomes 1."""
    if not output.HasField("prompt_logprobs_start"):
        return 0
    if (start := output.prompt_logprobs_start) >= num_prompt:
        limit = f"{num_prompt - 1} (the prompt has {numbered(num_prompt, 'token')})"
        refuse("output.prompt_logprobs_start", f"is {start}", limit)
    return max(1, start) if num_prompt > 1 else 0


def maximum_of(stop: pb.StopParams, num_prompt: int, model: Model, limits: CallerLimits) -> tuple[int, bool]:
    """Returns the most output tokens of a request's samples, and whether the caller set them.

    Raises Refusal if the prompt leaves no room for one.

    Unset, it is the operator's default or the caller's own limit, and otherwise the rest of the context, as far as the
    pages of the largest worker hold it.
    """
    max_length = model.sizes.length
    if num_prompt >= max_length:
        limit = f"{max_length - 1} (max_length {max_length}, less one new token)"
        refuse("prompt", f"has {numbered(num_prompt, 'token')}", limit)
    if stop.HasField("max_new_tokens"):
        # If more are asked for than fit, the core ends the stream with CONTEXT_FULL. The exact number does not matter.
        return min(stop.max_new_tokens, max_length), True
    # A prompt that fits no present worker is measured against the recently lost ones.
    room = (model.longest_sequence if num_prompt < model.longest_sequence else max_length) - num_prompt
    return min(room, model.info.default_max_new_tokens or room, limits.max_new_tokens or room), False


def check_detokenize(request: pb.DetokenizeRequest, model: Model) -> Tokenizer:
    """Checks a Detokenize request and returns the tokenizer. Raises Refusal."""
    if model.tokenizer is None:
        raise wrong("token_ids", "need a tokenizer, and the served model has none")
    _check_detokenize(request, model.sizes)
    check_token_ids("token_ids", request.token_ids, model)
    return model.tokenizer


def _check_linger(request: pb.GenerateRequest) -> None:
    seconds, output = request.resume.linger_seconds, request.output
    for name in ("logprobs", "prompt_logprobs_start"):
        if seconds and output.HasField(name):
            why = "logprobs are not kept for a caller that comes back, so only one of the two is possible"
            raise wrong("resume.linger_seconds", f"is {seconds:g} and output.{name} is set; {why}")


def check_resume(request: pb.ResumeRequest) -> None:
    """Checks what needs no knowledge of the resumed request. Raises Refusal."""
    if not request.request_id:
        raise wrong("request_id", "is empty; an id is needed")
    _check_resume(request)
    check_request_id("request_id", request.request_id)


def check_offsets(offsets: list[pb.SampleOffset], num_tokens: list[int]) -> None:
    """Refuses offsets beyond the samples' `num_tokens` output tokens."""
    if len(offsets) > len(num_tokens):
        refuse("offsets", f"is {len(offsets)} long", f"{len(num_tokens)}, the request's number of samples")
    for idx, (offset, count) in enumerate(zip(offsets, num_tokens, strict=False)):
        if offset.token_ids > count:
            refuse(
                f"offsets[{idx}].token_ids", f"is {offset.token_ids}", f"{count}, the sample's number of tokens so far"
            )
