"""The core's door: may this request enter, and what does it become inside?

Pure functions; owns nothing. What can never run is refused here with the arithmetic, so that nothing inside ever waits
for pages or positions which do not exist. A request enters with all its samples or not at all.
"""

from collections.abc import Sequence

from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.config import MAX_NUM_SAMPLES, CoreConfig
from scheduler_svc.core.effects import RejectCode
from scheduler_svc.core.events import Int32Array, Submit, WorkerInfo
from scheduler_svc.core.lane import pages_at_once
from scheduler_svc.core.page_hash import HASH_BYTES
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenants

# Code, field, sentence.
Refusal = tuple[RejectCode, str, str]


def refusal(event: Submit, *, offers: Sequence[WorkerInfo], book: RequestBook, config: CoreConfig) -> Refusal | None:
    """Why the request may not enter; None: it may. `offers`, at least one, are the workers that may come to run it."""
    if book.of_id(event.request_id) or any(book.by_stream(event.frontend, stream) for stream in event.streams):
        return RejectCode.DUPLICATE, "request_id", f"request_id {event.request_id!r} is live already"
    return _never(event, offers, config) or _not_now(event, book, config)


def _never(event: Submit, offers: Sequence[WorkerInfo], config: CoreConfig) -> Refusal | None:
    """What no patience helps."""
    prompt, samples, info = len(event.prompt), event.num_samples, offers[0]
    misfits = [misfit(offer, prompt, event.max_new_tokens) for offer in offers]
    if None not in misfits:
        field, reason = misfits[0] or ("", "")
        return RejectCode.INVALID, field, reason
    limit = most_samples(config)
    if samples > limit:
        return RejectCode.INVALID, "sampling.num_samples", f"num_samples is {samples}; the limit is {limit}"
    if samples * prompt > config.max_waiting_tokens:
        limit = f"the limit of tokens that wait is {config.max_waiting_tokens}"
        if samples == 1:
            return RejectCode.INVALID, "token_ids", f"the prompt has {prompt} tokens; {limit}"
        sentence = f"num_samples is {samples} and the prompt has {prompt} tokens, {samples * prompt} together; {limit}"
        return RejectCode.INVALID, "sampling.num_samples", sentence
    fields: list[tuple[str, Int32Array]] = [("token_ids", event.prompt)]
    if event.sampling.extras is not None:
        fields.append(("sampling.logit_bias", event.sampling.extras.biased))
        fields.append(("sampling.allowed_token_ids", event.sampling.extras.allowed))
    for field, tokens in fields:
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= info.vocab_size):
            return RejectCode.INVALID, field, f"a token id is outside 0 to {info.vocab_size - 1}"
    return None


def most_samples(config: CoreConfig) -> int:
    """Samples of one request that can ever be admitted."""
    return min(MAX_NUM_SAMPLES, config.max_waiting)


def _not_now(event: Submit, book: RequestBook, config: CoreConfig) -> Refusal | None:
    """What another moment may allow."""
    prompt, samples, limit = len(event.prompt), event.num_samples, config.max_waiting
    if book.num_waiting + samples > limit:
        more = f" and num_samples is {samples}" if samples > 1 else ""
        return RejectCode.QUEUE_FULL, "", f"{book.num_waiting} requests are waiting{more}; the limit is {limit}"
    limit = config.max_waiting_tokens
    if book.waiting_tokens + samples * prompt > limit:
        each = f" for each of {samples} samples" if samples > 1 else ""
        sentence = f"{book.waiting_tokens} tokens are waiting and the prompt has {prompt}{each}; the limit is {limit}"
        return RejectCode.QUEUE_FULL, "", sentence
    return None


def misfit(info: WorkerInfo, prompt: int, max_new_tokens: int) -> tuple[str, str] | None:
    """Why such a request can never run on such a worker: the field, and the arithmetic; None: it can.

    More new tokens than the model has positions for are no reason: the stream ends where these do.
    """
    if prompt >= info.max_length:
        reason = f"the prompt has {prompt} tokens, and a new one makes {prompt + 1}; the limit is {info.max_length}"
        return "token_ids", reason
    new = min(max_new_tokens, info.max_length - prompt)
    # The last token is sampled, never computed.
    pages = pages_at_once(info, prompt + new - 1)
    if pages > info.usable_pages:
        reason = (
            f"prompt ({prompt} tokens) and max_new_tokens ({new}) take {pages} pages of "
            f"{info.page_size} tokens; the pool has {info.usable_pages}"
        )
        return "stop.max_new_tokens", reason
    return None


def new_requests(
    event: Submit, *, first_handle: int, offers: Sequence[WorkerInfo], tenants: Tenants, fair: bool, now: float
) -> list[Request]:
    """The admitted samples, a request each; a handle is also its place in the order of arrival.

    They share the prompt and all settings. What the prompt's tokens are likely to be is told once, with the first.
    """
    prompt_tokens, page_size = len(event.prompt), offers[0].page_size
    eos_token_ids = offers[0].eos_token_ids
    wanted = prompt_tokens + event.max_new_tokens
    total = min(wanted, max(offer.max_length for offer in offers))
    hashes = _page_hashes(event, page_size)
    tenant = event.prefix_root if fair else b""
    banned: tuple[int, ...] = ()
    if event.min_new_tokens > 0:
        own = () if event.ignore_eos else eos_token_ids
        banned = tuple(dict.fromkeys((*own, *event.stop_token_ids)))
    stops = frozenset(event.stop_token_ids)
    prompt_logprobs_from = event.prompt_logprobs_from if event.prompt_logprobs_from < len(event.prompt) else 0
    return [
        Request(
            handle=first_handle + i,
            frontend=event.frontend,
            stream=stream,
            request_id=event.request_id,
            prompt=event.prompt,
            sampling=event.sampling,
            sample_idx=i,
            total_length=total,
            is_cut=total < wanted,
            min_new_tokens=event.min_new_tokens,
            stop_token_ids=stops,
            banned=banned,
            ignore_eos=event.ignore_eos,
            priority=event.priority,
            arrival=first_handle + i,
            arrived_at=now,
            tag=tenants.tag(tenant, total),
            prefix_root=event.prefix_root,
            page_hashes=list(hashes),
            cache_read=event.cache_read,
            cache_write=event.cache_write,
            prompt_logprobs_from=0 if i else prompt_logprobs_from,
        )
        for i, stream in enumerate(event.streams)
    ]


def _page_hashes(event: Submit, page_size: int) -> list[bytes]:
    """Those of the prompt's full pages, as far as they came along; the rest is hashed when it is needed."""
    if not event.prefix_root:
        return []
    count = min(len(event.page_hashes) // HASH_BYTES, len(event.prompt) // page_size)
    return [event.page_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count)]
