"""The truth: what a request must answer, from its prompt and settings alone.

A plain chain over a list of tokens. Knows nothing of pages, rows, chunks, preemption, workers or time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.rigs.hashing import ROOT, draw, extend


class Reason(StrEnum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Output token ids, the one that ended them included."""

    tokens: tuple[int, ...]
    reason: Reason
    stop_token_id: int | None


def complete(
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    vocab: int,
    eos_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    sample_idx: int = 0,
    min_new_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    ignore_eos: bool = False,
) -> Completion:
    """Token ids until EOS, a stop token or the length; `vocab` is the number of ids that may be drawn."""
    if not prompt:
        raise ValueError("the prompt is empty")
    eos = frozenset() if ignore_eos else frozenset(eos_token_ids)
    stops = frozenset(stop_token_ids)
    history = ROOT
    for token in prompt:
        history = extend(history, token)
    out: list[int] = []
    while len(out) < max_new_tokens:
        banned = eos | stops if len(out) < min_new_tokens else frozenset()
        token = draw(history, vocab=vocab, temperature=temperature, seed=seed, sample_idx=sample_idx, banned=banned)
        out.append(token)
        if token in stops:
            return Completion(tokens=tuple(out), reason=Reason.STOP_TOKEN, stop_token_id=token)
        if token in eos:
            return Completion(tokens=tuple(out), reason=Reason.EOS, stop_token_id=token)
        history = extend(history, token)
    return Completion(tokens=tuple(out), reason=Reason.LENGTH, stop_token_id=None)
