"""Logprobs in the three shapes that OpenAI's and vLLM's APIs have.

Pure: token ids and numbers in, JSON values out. `texts` has the text of every token; `ids_of` tells which are needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.v1 import inference_pb2

# JSON has no infinity; vLLM has the same bound.
_LOWEST = -9999.0
Texts = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, its logprob, and the most probable tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def tokens_of(ids: Sequence[int], logprobs: inference_pb2.Logprobs, num_top: int) -> list[TokenLogprob]:
    """Joins ids and their packed logprobs; keeps the first `num_top` alternatives of each."""
    found, k = list[TokenLogprob](), logprobs.top_k
    kept = min(k, num_top)
    for i, (token_id, logprob) in enumerate(zip(ids, logprobs.logprobs, strict=True)):
        top_ids, top = logprobs.top_token_ids[i * k : i * k + kept], logprobs.top_logprobs[i * k : i * k + kept]
        pairs = tuple((top_id, _bounded(value)) for top_id, value in zip(top_ids, top, strict=True))
        found.append(TokenLogprob(token_id, _bounded(logprob), pairs))
    return found


def ids_of(tokens: Sequence[TokenLogprob]) -> Iterator[int]:
    """All ids whose texts are needed."""
    for token in tokens:
        yield token.token_id
        yield from (top_id for top_id, _ in token.top)


def of_chat(tokens: Sequence[TokenLogprob], texts: Texts) -> dict[str, object]:
    """The `logprobs` of a chat's choice."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        text = texts[token_id]
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def of_completion(
    tokens: Sequence[TokenLogprob | int], texts: Texts, *, offset: int, with_top: bool
) -> dict[str, object]:
    """The `logprobs` of a completion's choice, whose first token begins at character `offset`.

    An id without logprobs is the first token of a prompt.
    """
    found: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token in tokens:
        is_first = isinstance(token, int)
        text = texts[token if is_first else token.token_id]
        found["text_offset"].append(offset)
        found["tokens"].append(text)
        found["token_logprobs"].append(None if is_first else token.logprob)
        found["top_logprobs"].append(None if is_first else _by_text(token, texts))
        offset += len(text)
    return {**found} if with_top else {**found, "top_logprobs": None}


def of_prompt(tokens: Sequence[TokenLogprob], texts: Texts) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`. The rank of a token that is not among the most probable ones is unknown."""
    found: list[dict[str, object] | None] = [None]
    for token in tokens:
        entries: dict[str, object] = {}
        for rank, (token_id, logprob) in enumerate(token.top, 1):
            entries[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": texts[token_id]}
        own = {"logprob": token.logprob, "rank": None, "decoded_token": texts[token.token_id]}
        entries.setdefault(str(token.token_id), own)
        found.append(entries)
    return found


def _by_text(token: TokenLogprob, texts: Texts) -> dict[str, float]:
    """Logprobs by text. Of tokens with equal texts, such as parts of characters, the most probable one counts."""
    found: dict[str, float] = {}
    for token_id, logprob in token.top:
        found.setdefault(texts[token_id], logprob)
    found.setdefault(texts[token.token_id], token.logprob)
    return found


def _bounded(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST
