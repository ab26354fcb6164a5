"""Logprobs in the three shapes that OpenAI's and vLLM's APIs have. Pure: token ids, numbers and pieces in, JSON out."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.v1 import inference_pb2

# JSON has no infinity; vLLM has the same bound.
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logprob, and what it adds to the text: see tandem.v1.TokenPiece."""

    token_id: int
    # None: the first token of a prompt.
    logprob: float | None
    text: str
    data: bytes

    @property
    def num_chars(self) -> int:
        """Characters of the text."""
        return len(self.text) if self.data else 0


@dataclass(frozen=True, slots=True)
class TokenLogprob(Scored):
    """One token of a text, and the most probable tokens in its place."""

    top: tuple[Scored, ...] = ()


def tokens_of(ids: Sequence[int], logprobs: inference_pb2.Logprobs, num_top: int) -> list[TokenLogprob]:
    """Joins ids and their packed logprobs; keeps the first `num_top` alternatives of each."""
    found, k = list[TokenLogprob](), logprobs.top_k
    kept = min(k, num_top)
    for i, (token_id, logprob) in enumerate(zip(ids, logprobs.logprobs, strict=True)):
        top_ids, top = logprobs.top_token_ids[i * k : i * k + kept], logprobs.top_logprobs[i * k : i * k + kept]
        alternatives = tuple(
            Scored(top_id, _bounded(value), *_piece(top_id, logprobs.top_pieces, i * k + rank))
            for rank, (top_id, value) in enumerate(zip(top_ids, top, strict=True))
        )
        found.append(TokenLogprob(token_id, _bounded(logprob), *_piece(token_id, logprobs.pieces, i), alternatives))
    return found


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """The `logprobs` of a chat's choice. A token that is left out of the text has no bytes."""

    def entry(token: Scored) -> dict[str, object]:
        data = list(token.data) if token.data else None
        return {"token": token.text, "logprob": token.logprob, "bytes": data}

    content = [{**entry(token), "top_logprobs": [entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def of_completion(parts: Sequence[tuple[int, Sequence[TokenLogprob]]], *, with_top: bool) -> dict[str, object]:
    """The `logprobs` of a completion's choice: parts of the text, each with the character at which it begins."""
    found: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for offset, tokens in parts:
        for token in tokens:
            found["text_offset"].append(offset)
            found["tokens"].append(token.text)
            found["token_logprobs"].append(token.logprob)
            found["top_logprobs"].append(None if token.logprob is None else _by_text(token))
            offset += token.num_chars
    return {**found} if with_top else {**found, "top_logprobs": None}


def of_prompt(tokens: Sequence[TokenLogprob]) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`. The rank of a token that is not among the most probable ones is unknown."""
    found: list[dict[str, object] | None] = [None]
    for token in tokens:
        entries: dict[str, object] = {}
        for rank, top in enumerate(token.top, 1):
            entries[str(top.token_id)] = {"logprob": top.logprob, "rank": rank, "decoded_token": top.text}
        own = {"logprob": token.logprob, "rank": None, "decoded_token": token.text}
        entries.setdefault(str(token.token_id), own)
        found.append(entries)
    return found


def _by_text(token: TokenLogprob) -> dict[str, float | None]:
    """Logprobs by text, the token's own too. Of tokens with equal texts one has the text, first the token itself."""
    found: dict[str, float | None] = {}
    for top in token.top:
        is_taken = top.text in found or (top.text == token.text and top.token_id != token.token_id)
        found[_name(top.token_id) if is_taken else top.text] = top.logprob
    found.setdefault(token.text, token.logprob)
    return found


def _piece(token_id: int, pieces: Sequence[inference_pb2.TokenPiece], idx: int) -> tuple[str, bytes]:
    """(text, bytes). A model without a tokenizer has no pieces and no text."""
    return (pieces[idx].text, pieces[idx].data) if pieces else (_name(token_id), b"")


def _name(token_id: int) -> str:
    """What vLLM writes for an id without a text."""
    return f"token_id:{token_id}"


def _bounded(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST
