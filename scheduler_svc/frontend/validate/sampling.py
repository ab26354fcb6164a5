"""Owns the check of how tokens shall be drawn: the scalars in force, and which tokens are biased, allowed or banned.

Knows nothing of prompts or streams. Banned tokens travel as a bias of minus infinity; a ban wins over a bias.
"""

import secrets
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.validate.checks import check_above_zero, check_count, check_range, check_token_ids

MAX_TEMPERATURE = 100
# Presence and frequency, either way.
MAX_PENALTY = 2
# As a float32 has it.
MIN_REPETITION_PENALTY = float(np.float32(0.01))
MAX_REPETITION_PENALTY = 100
MAX_BIAS = 100
# Of each list: biased, allowed, banned.
MAX_LISTED_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How the tokens of a request are drawn. Empty `allowed_token_ids` allow every token."""

    # All scalars set, no lists.
    in_force: pb.SamplingParams
    # Ascending; one bias each, finite or minus infinity.
    biased_token_ids: NDArray[np.int32]
    biases: NDArray[np.float32]
    allowed_token_ids: NDArray[np.int32]


def check_sampling(asked: pb.SamplingParams, stop: pb.StopParams, model: Model) -> Drawing:
    """What is asked for over the model's defaults. Raises Refusal."""
    banned = _check_banned(asked, model)
    allowed = _check_allowed(asked, model)
    silent_at_first = frozenset(stop.stop_token_ids) | (frozenset[int]() if stop.ignore_eos else model.eos_token_ids)
    _check_one_remains(allowed, banned, silent_at_first if stop.min_new_tokens else frozenset(), model)
    tokens, biases = _check_biases(asked, model)
    if banned:
        banned_ids = np.fromiter(banned, np.int64, len(banned))
        is_left = ~np.isin(tokens, banned_ids)
        tokens = np.concatenate((tokens[is_left], banned_ids))
        biases = np.concatenate((biases[is_left], np.full(len(banned_ids), -np.inf, np.float32)))
        order = np.argsort(tokens)
        tokens, biases = tokens[order], biases[order]
    return Drawing(
        in_force=_check_scalars(asked, model),
        biased_token_ids=tokens.astype(np.int32),
        biases=biases,
        allowed_token_ids=np.array(sorted(allowed), np.int32),
    )


def _check_scalars(asked: pb.SamplingParams, model: Model) -> pb.SamplingParams:
    sampling = pb.SamplingParams()
    sampling.CopyFrom(model.defaults)
    sampling.MergeFrom(asked)
    for field in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        sampling.ClearField(field)
    if not asked.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    check_range("sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    check_above_zero("sampling.top_p", sampling.top_p, 1)
    check_range("sampling.top_k", sampling.top_k, 0, max(model.info.vocab_size, model.defaults.top_k))
    check_range("sampling.min_p", sampling.min_p, 0, 1)
    check_range("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_range("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    penalty = sampling.repetition_penalty
    check_range("sampling.repetition_penalty", penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    check_range("sampling.num_samples", sampling.num_samples, 1, max(1, model.info.max_num_samples))
    return sampling


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


def _check_biases(asked: pb.SamplingParams, model: Model) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens, ascending, and their biases. A bias of 0 is none."""
    count = len(asked.logit_bias)
    check_count("sampling.logit_bias", count, MAX_LISTED_TOKENS)
    tokens = np.fromiter(asked.logit_bias.keys(), np.int64, count)
    order = np.argsort(tokens)
    tokens, biases = tokens[order], np.fromiter(asked.logit_bias.values(), np.float32, count)[order]
    # A NaN is in no range.
    is_bad = (tokens >= model.info.vocab_size) | ~(np.abs(biases) <= MAX_BIAS)
    if is_bad.any():
        idx = int(is_bad.argmax())
        token, field = int(tokens[idx]), f"sampling.logit_bias[{tokens[idx]}]"
        if token >= model.info.vocab_size:
            message = f"{field} is for token {token}; the vocabulary has {model.info.vocab_size} tokens"
            raise status.invalid(field, message)
        check_range(field, float(biases[idx]), -MAX_BIAS, MAX_BIAS)
    is_biased = biases != 0
    return tokens[is_biased], biases[is_biased]


def _check_one_remains(allowed: Set[int], banned: Set[int], silent_at_first: Set[int], model: Model) -> None:
    """A row always has a token to draw, also before min_new_tokens are out, when stop tokens may not be."""
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
        why = "before stop.min_new_tokens are out, when end-of-sequence and stop tokens are not drawn"
        raise status.invalid(field, f"{many}, and none of them may be drawn {why}; 1 must remain")
