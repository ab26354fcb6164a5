"""Sort keys of requests: in the queue of one tenant, on a lane, and against the suspects of a trial."""

from scheduler_svc.core.state.request import Request

AGEING_TOKENS = 65_536
"""Virtual time that one step of priority is worth. It is finite, so requests of low priority do not starve."""

QueueKey = tuple[int, int]
Entry = tuple[QueueKey, Request]
"""A waiting request with its `queue_key`."""


def queue_key(request: Request) -> QueueKey:
    """Returns the request's sort key among the requests of its tenant. The smallest key goes first."""
    return (request.virtual_start - request.priority * AGEING_TOKENS, request.arrival)


def running_key(request: Request) -> tuple[int, int, int]:
    """Returns the sort key of a running request among all: its turn, then its `queue_key`.

    Without a token file there is one tenant, so its queue keys alone give the order.
    """
    turn = request.turn if request.tenant else 0
    return (turn, request.virtual_start - request.priority * AGEING_TOKENS, request.arrival)


def trial_key(request: Request) -> QueueKey:
    """Returns the key by which waiting requests of all tenants are compared with the suspects of a trial.

    The queue keys of two tenants say nothing about each other, so with a token file the order of arrival counts.
    """
    return (request.arrival, 0) if request.tenant else queue_key(request)
