"""The core's door: may this request enter, and what does it become inside?

Pure functions; owns nothing. What can never run is refused here with the arithmetic, so that nothing inside ever waits
for pages or positions which do not exist. A request enters with all its samples or not at all.
"""

from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.config import MAX_NUM_SAMPLES, CoreConfig
from scheduler_svc.core.effects import RejectCode
from scheduler_svc.core.events import Int32Array, Submit, WorkerInfo
from scheduler_svc.core.request import Request

# Code, field, sentence.
Refusal = tuple[RejectCode, str, str]


def refusal(event: Submit, *, info: WorkerInfo, book: RequestBook, config: CoreConfig) -> Refusal | None:
    """Why the request may not enter; None: it may."""
    if book.of_id(event.request_id) or any(book.by_stream(event.frontend, stream) for stream in event.streams):
        return RejectCode.DUPLICATE, "request_id", f"request_id {event.request_id!r} is live already"
    return _never(event, info, config) or _not_now(event, book, config)


def _never(event: Submit, info: WorkerInfo, config: CoreConfig) -> Refusal | None:
    """What no patience helps."""
    prompt, samples = len(event.prompt), event.num_samples
    reason = misfit(info, prompt, event.max_new_tokens)
    if reason is not None:
        return RejectCode.INVALID, "stop.max_new_tokens", reason
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


def misfit(info: WorkerInfo, prompt: int, max_new_tokens: int) -> str | None:
    """Why such a request can never run on such a worker, with the arithmetic; None: it can."""
    total = prompt + max_new_tokens
    if total > info.max_length:
        return (
            f"prompt ({prompt} tokens) and max_new_tokens ({max_new_tokens}) make {total}; "
            f"the limit is {info.max_length}"
        )
    # The last token is sampled, never computed.
    pages = -(-(total - 1) // info.page_size)
    if pages > info.usable_pages:
        return (
            f"prompt ({prompt} tokens) and max_new_tokens ({max_new_tokens}) take {pages} pages of "
            f"{info.page_size} tokens; the pool has {info.usable_pages}"
        )
    return None


def new_requests(event: Submit, *, first_handle: int, eos_token_ids: tuple[int, ...], now: float) -> list[Request]:
    """The admitted samples, a request each; a handle is also its place in the order of arrival.

    They share the prompt and all settings. What the prompt's tokens are likely to be is told once, with the first.
    """
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
            total_length=len(event.prompt) + event.max_new_tokens,
            min_new_tokens=event.min_new_tokens,
            stop_token_ids=stops,
            banned=banned,
            ignore_eos=event.ignore_eos,
            priority=event.priority,
            arrival=first_handle + i,
            arrived_at=now,
            prompt_logprobs_from=0 if i else prompt_logprobs_from,
        )
        for i, stream in enumerate(event.streams)
    ]
