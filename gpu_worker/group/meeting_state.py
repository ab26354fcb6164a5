"""What the hosts of a group write to the store of their meeting: JSON, where torch would write and read pickles.

Torch's rendezvous keeps one object in the store and unpickles what it reads, so whoever reaches the port could run code
in every launcher. `handler_of` puts a codec of JSON in the place of the module `pickle` there; what is read is checked.
Owns the JSON; its fields are those of torch's `_RendezvousState`.
"""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

_MOST_BYTES = 1 << 20


class _Host(BaseModel):
    """A launcher at the meeting. rank: its number among the hosts, if it takes part. seen: when it last gave a sign."""

    model_config = ConfigDict(extra="forbid")

    addr: str = Field(max_length=255)
    pid: int
    local_id: int
    rank: int | None = None
    waits: bool = False
    is_spare: bool = False
    seen: datetime | None = None


class _State(BaseModel):
    """The meeting."""

    model_config = ConfigDict(extra="forbid")

    round: int
    complete: bool
    deadline: datetime | None
    closed: bool
    hosts: list[_Host]


def handler_of(parameters: RendezvousParameters) -> RendezvousHandler:
    """A place at the meeting. Raises RendezvousError."""
    dynamic_rendezvous.pickle = _Json  # type: ignore[attr-defined]
    return get_rendezvous_handler(parameters)


def encoded(state: _RendezvousState) -> bytes:
    """The state as JSON, the same bytes for equal states."""
    known = {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    hosts = [
        _Host(
            addr=each.addr,
            pid=each.pid,
            local_id=each.local_id,
            rank=state.participants.get(each),
            waits=each in state.wait_list,
            is_spare=each in state.redundancy_list,
            seen=state.last_heartbeats.get(each),
        )
        for each in sorted(known)
    ]
    plain = _State(
        round=state.round, complete=state.complete, deadline=state.deadline, closed=state.closed, hosts=hosts
    )
    return plain.model_dump_json().encode()


def decoded(data: bytes) -> _RendezvousState:
    """The state of this JSON. Raises RendezvousStateError."""
    if len(data) > _MOST_BYTES:
        raise RendezvousStateError(f"the state of the meeting has {len(data)} bytes; the limit is {_MOST_BYTES}")
    try:
        plain = _State.model_validate_json(data)
    except ValidationError as error:
        raise RendezvousStateError("the state of the meeting is not one of a launcher of this version") from error
    state = _RendezvousState()
    state.round, state.complete, state.closed = plain.round, plain.complete, plain.closed
    state.deadline = plain.deadline
    for host in plain.hosts:
        each = _NodeDesc(host.addr, host.pid, host.local_id)
        if host.rank is not None:
            state.participants[each] = host.rank
        if host.waits:
            state.wait_list.add(each)
        if host.is_spare:
            state.redundancy_list.add(each)
        if host.seen is not None:
            state.last_heartbeats[each] = host.seen
    return state


class _Json:
    """The part of the module `pickle` that torch's rendezvous uses."""

    # `decoded` raises the error that torch makes of this one.
    PickleError = ValueError
    dumps, loads = staticmethod(encoded), staticmethod(decoded)
