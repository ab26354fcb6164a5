"""The core's door: may this request enter, and what does it become inside?

Pure functions; owns nothing. What can never run is refused here with the arithmetic, so that nothing inside ever waits
for pages or positions which do not exist.
"""

from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.effects import RejectCode
from scheduler_svc.core.events import Submit, WorkerInfo
from scheduler_svc.core.request import Request


def refusal(
    event: Submit, *, info: WorkerInfo, book: RequestBook, max_waiting: int, max_waiting_tokens: int
) -> tuple[RejectCode, str, str] | None:
    """Why the request may not enter: code, field, sentence. None: it may."""
    prompt = len(event.prompt)
    if book.by_id(event.request_id) is not None or book.by_stream(event.frontend, event.stream) is not None:
        return RejectCode.DUPLICATE, "request_id", f"request_id {event.request_id!r} is live already"
    reason = misfit(info, prompt, event.max_new_tokens)
    if reason is not None:
        return RejectCode.INVALID, "stop.max_new_tokens", reason
    if int(event.prompt.min()) < 0 or int(event.prompt.max()) >= info.vocab_size:
        return RejectCode.INVALID, "token_ids", f"a token id is outside 0 to {info.vocab_size - 1}"
    if book.num_waiting >= max_waiting:
        return RejectCode.QUEUE_FULL, "", f"{book.num_waiting} requests are waiting; the limit is {max_waiting}"
    if book.waiting_tokens + prompt > max_waiting_tokens:
        sentence = (
            f"{book.waiting_tokens} tokens are waiting and the prompt has {prompt}; the limit is {max_waiting_tokens}"
        )
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


def new_request(event: Submit, *, handle: int, eos_token_ids: tuple[int, ...], now: float) -> Request:
    """The admitted request; its handle is also its place in the order of arrival."""
    banned: tuple[int, ...] = ()
    if event.min_new_tokens > 0:
        own = () if event.ignore_eos else eos_token_ids
        banned = tuple(dict.fromkeys((*own, *event.stop_token_ids)))
    return Request(
        handle=handle,
        frontend=event.frontend,
        stream=event.stream,
        request_id=event.request_id,
        prompt=event.prompt,
        sampling=event.sampling,
        total_length=len(event.prompt) + event.max_new_tokens,
        min_new_tokens=event.min_new_tokens,
        stop_token_ids=frozenset(event.stop_token_ids),
        banned=banned,
        ignore_eos=event.ignore_eos,
        priority=event.priority,
        arrival=handle,
        arrived_at=now,
    )
