"""Recounts what the queue keeps for each tenant. Changes nothing; a broken invariant raises an AssertionError."""

from collections import Counter

from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.request import Phase


def audit_tenants(queue: RequestQueue) -> None:
    """Checks waiting requests, their tokens, rows and turns of all tenants."""
    waiting, tokens, reserved = Counter[str](), Counter[str](), Counter[str]()
    running: dict[str, set[int]] = {}
    for request in queue:
        reserved[request.tenant] += request.total_length if request.turn >= 0 else 0
        if request.phase is Phase.WAITING:
            waiting[request.tenant] += 1
            tokens[request.tenant] += request.known
        else:
            assert request.turn >= 0, f"{request.request_id} runs without a turn"
            running.setdefault(request.tenant, set()).add(request.handle)
    for name, account in queue.accounts.items():
        counted, found = (account.waiting, account.waiting_tokens), (waiting[name], tokens[name])
        assert counted == found, f"tenant {name!r}: waiting and tokens are counted as {counted}, but are {found}"
    for name, tenant in queue.turns.queues.items():
        rows = set(tenant.running)
        assert rows == running.get(name, set()), f"tenant {name!r}: its rows are {rows}"
        assert tenant.reserved == reserved[name], f"tenant {name!r}: {tenant.reserved} tokens are reserved"
        assert tenant.used >= 0, f"tenant {name!r} has used {tenant.used} tokens"
