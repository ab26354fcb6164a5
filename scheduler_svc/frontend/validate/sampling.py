"""Owns the check of a request's sampling settings. It makes the complete SamplingParams that travels to the worker.

Knows nothing of prompts or streams. The core passes the bytes on unread; the worker parses them
(`gpu_worker/wire/started.py`).
"""

import secrets
from collections.abc import Set

import numpy as np
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sampling_limits import LIMITS
from scheduler_svc.frontend.sizes.limits import MAX_BIAS, MAX_LISTED_TOKENS
from scheduler_svc.frontend.validate.checks import check_above_zero, check_count, check_range, check_token_ids


def check_sampling(asked: pb.SamplingParams, stop: pb.StopParams, model: Model) -> pb.SamplingParams:
    """Returns the request's settings over the model's defaults, every scalar set. The worker so needs no defaults.

    Raises Refusal.
    """
    banned = _check_banned(asked, model)
    allowed = _check_allowed(asked, model)
    silent_at_first = frozenset(stop.stop_token_ids) | (frozenset[int]() if stop.ignore_eos else model.eos_token_ids)
    _check_one_remains(allowed, banned, silent_at_first if stop.min_new_tokens else frozenset(), model)
    without_effect = _check_biases(asked, model)
    sampling = pb.SamplingParams()
    sampling.CopyFrom(model.defaults)
    sampling.MergeFrom(asked)
    for token in without_effect:
        del sampling.logit_bias[token]
    if not asked.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    _check_scalars(sampling, model)
    if sampling.top_p == 0:
        # Of the tokens that reach no probability only the most probable one is kept.
        sampling.temperature, sampling.top_p = 0, LIMITS["top_p"].off
    return sampling


def without_lists(sampling: pb.SamplingParams) -> pb.SamplingParams:
    """Returns the scalars alone, which is what Accepted reports."""
    scalars = pb.SamplingParams()
    scalars.CopyFrom(sampling)
    for field in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        scalars.ClearField(field)
    return scalars


def _check_scalars(sampling: pb.SamplingParams, model: Model) -> None:
    for name, limits in LIMITS.items():
        field, value = f"sampling.{name}", getattr(sampling, name)
        if limits.above_low:
            check_above_zero(field, value, limits.high)
        else:
            check_range(field, value, limits.low, limits.high)
    check_range("sampling.top_k", sampling.top_k, 0, max(model.info.vocab_size, model.defaults.top_k))
    check_range("sampling.num_samples", sampling.num_samples, 1, max(1, model.info.max_num_samples))


def _check_banned(asked: pb.SamplingParams, model: Model) -> Set[int]:
    banned = asked.banned_token_ids
    check_count("sampling.banned_token_ids", len(banned), MAX_LISTED_TOKENS)
    if banned:
        check_token_ids("sampling.banned_token_ids", banned, model)
    return frozenset(banned)


def _check_allowed(asked: pb.SamplingParams, model: Model) -> Set[int]:
    if not asked.HasField("allowed_token_ids"):
        return frozenset()
    allowed = asked.allowed_token_ids.ids
    check_count("sampling.allowed_token_ids.ids", len(allowed), MAX_LISTED_TOKENS)
    check_token_ids("sampling.allowed_token_ids.ids", allowed, model)
    return frozenset(allowed)


def _check_biases(asked: pb.SamplingParams, model: Model) -> list[int]:
    """Checks the biases. Returns the tokens whose bias is 0, which has no effect."""
    count = len(asked.logit_bias)
    check_count("sampling.logit_bias", count, MAX_LISTED_TOKENS)
    tokens = np.fromiter(asked.logit_bias.keys(), np.int64, count)
    biases = np.fromiter(asked.logit_bias.values(), np.float32, count)
    # A NaN is outside every range.
    is_bad = (tokens >= model.info.vocab_size) | ~(np.abs(biases) <= MAX_BIAS)
    if is_bad.any():
        token = int(tokens[is_bad].min())
        field = f"sampling.logit_bias[{token}]"
        if token >= model.info.vocab_size:
            message = f"{field} is for token {token}; the vocabulary has {model.info.vocab_size} tokens"
            raise status.invalid(field, message)
        check_range(field, asked.logit_bias[token], -MAX_BIAS, MAX_BIAS)
    return tokens[biases == 0].tolist()


def _check_one_remains(allowed: Set[int], banned: Set[int], silent_at_first: Set[int], model: Model) -> None:
    """Refuses lists that leave no token to sample, also before min_new_tokens, while stop tokens are banned."""
    if allowed:
        field, many = "sampling.allowed_token_ids", f"sampling.allowed_token_ids has {len(allowed)} tokens"
        num_drawable, num_at_first = len(allowed - banned), len(allowed - banned - silent_at_first)
    else:
        field, many = "sampling.banned_token_ids", f"the vocabulary has {model.info.vocab_size} tokens"
        num_drawable = model.info.vocab_size - len(banned)
        num_at_first = model.info.vocab_size - len(banned | silent_at_first)
    if not num_drawable:
        raise status.invalid(field, f"{many}, and sampling.banned_token_ids bans them all; 1 must remain")
    if not num_at_first:
        why = "before stop.min_new_tokens, until which end-of-sequence and stop tokens are banned"
        raise status.invalid(field, f"{many}, and none of them may be sampled {why}; 1 must remain")
