"""The correct output of a request, computed from its prompt and settings alone.

It is a plain chain over a list of tokens. Knows nothing of pages, rows, chunks, preemption, workers or time.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.rigs.hashing import ROOT, extend, salt_of
from tests.rigs.sampling import Logprob, Settings, draw, logprob_of
from tests.rigs.toy_constraints import Matcher, ToyConstraint


class Reason(StrEnum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    CONSTRAINT_COMPLETE = "constraint_complete"
    # There was no mask for the next token.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Output token ids, including the one that ended them."""

    tokens: tuple[int, ...]
    reason: Reason
    stop_token_id: int | None


def complete(
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    vocab: int,
    eos_token_ids: Collection[int] = (),
    settings: Settings | None = None,
    min_new_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    ignore_eos: bool = False,
    constraint: bytes = b"",
    version_of: Callable[[int], str] = lambda _: "",
) -> Completion:
    """Returns token ids up to EOS, a stop token or the length. `vocab` is the number of ids if all are allowed.

    With a constraint, which toy_constraints reads, also up to where it is complete or fails. `version_of` returns the
    version of the weights that compute an output token, and all tokens before it again.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    settings = settings or Settings()
    key, banned = settings.key(len(prompt)), settings.banned()
    eos = frozenset() if ignore_eos else frozenset(eos_token_ids)
    stops = frozenset(stop_token_ids)
    version, out = version_of(0), list[int]()
    history = _history(prompt, salt_of(version))
    matcher = Matcher(ToyConstraint.of(constraint)) if constraint else None
    while len(out) < max_new_tokens:
        allowed = settings.allowed
        if matcher is not None:
            if matcher.fails:
                return Completion(tokens=tuple(out), reason=Reason.FAILED, stop_token_id=None)
            allowed = matcher.allowed(vocab, eos_token_ids)
        if (found := version_of(len(out))) != version:
            version, history = found, _history([*prompt, *out], salt_of(found))
        too_early = eos | stops if len(out) < min_new_tokens else frozenset()
        token = draw(history, key, vocab=vocab, allowed=allowed, banned=banned | too_early)
        out.append(token)
        if token in stops:
            return Completion(tokens=tuple(out), reason=Reason.STOP_TOKEN, stop_token_id=token)
        if token in eos:
            return Completion(tokens=tuple(out), reason=Reason.EOS, stop_token_id=token)
        if matcher is not None:
            matcher.take(token)
            if matcher.is_complete:
                return Completion(tokens=tuple(out), reason=Reason.CONSTRAINT_COMPLETE, stop_token_id=None)
        history = extend(history, token, salt_of(version))
    return Completion(tokens=tuple(out), reason=Reason.LENGTH, stop_token_id=None)


def logprobs(tokens: Sequence[int], *, start: int, vocab_size: int, top_k: int) -> list[Logprob]:
    """Returns the logprob of each token from position `start` on, given all tokens before it."""
    history, out = _history(tokens[:start]), list[Logprob]()
    for token in tokens[start:]:
        out.append(logprob_of(history, token, vocab_size=vocab_size, top_k=top_k))
        history = extend(history, token)
    return out


def next_token(tokens: Sequence[int], *, num_prompt: int, settings: Settings, vocab: int, version: str) -> int:
    """Returns the token after `tokens`, all of which the weights of this version compute."""
    key, banned = settings.key(num_prompt), settings.banned()
    history = _history(tokens, salt_of(version))
    return draw(history, key, vocab=vocab, allowed=settings.allowed, banned=banned)


def _history(tokens: Sequence[int], salt: int = 0) -> int:
    history = ROOT
    for token in tokens:
        history = extend(history, token, salt)
    return history
