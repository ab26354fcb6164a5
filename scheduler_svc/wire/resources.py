"""Translates what a request needs on a lane: resources of a Submit there and back, and the needs of started rows.

A constraint has fields of its own, as in the first version of the messages; the others name their kind. Owns no state.
"""

from collections.abc import Sequence

from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc.core.messages.plan import RowStart
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS, RESOURCE_HASH_BYTES, Resource
from scheduler_svc.wire.arrays import WireError
from tandem_contract.plural import numbered

# In a plan, the hash of a row without a constraint.
NONE = bytes(RESOURCE_HASH_BYTES)


def kind_of(name: str) -> str:
    """Returns the kind of an order or an answer, which names no constraint. Raises WireError if it is unknown."""
    if (name or CONSTRAINT) not in KINDS:
        raise WireError(f"the kind of resource {name[:64]!r} is unknown; the known ones are {', '.join(KINDS)}")
    return name or CONSTRAINT


def name_of(kind: str) -> str:
    """Returns the name of a kind in an order or an answer."""
    return "" if kind == CONSTRAINT else kind


def resources_of(submit: frontend_pb2.Submit) -> tuple[Resource, ...]:
    """Returns the resources of a request. Raises WireError if one has a wrong size, or two have the same kind."""
    has_constraint = submit.constraint or submit.constraint_hash
    found = [Resource(CONSTRAINT, submit.constraint_hash, submit.constraint)] if has_constraint else []
    found += [Resource(kind_of(one.kind), one.hash, one.source) for one in submit.other_resources]
    for one in found:
        num_source, limit = len(one.source), KINDS[one.kind].max_bytes
        if not 1 <= num_source <= limit:
            raise WireError(f"{one.kind} has {numbered(num_source, 'byte')}; it must have 1 to {limit}")
        if len(one.hash) != RESOURCE_HASH_BYTES:
            raise WireError(
                f"{one.kind}_hash has {numbered(len(one.hash), 'byte')}; it must have {RESOURCE_HASH_BYTES}"
            )
    if len({one.kind for one in found}) != len(found):
        raise WireError("two resources of the request have the same kind; it may have one of each")
    if submit.min_new_tokens and any(one.kind == CONSTRAINT for one in found):
        raise WireError(f"min_new_tokens is {submit.min_new_tokens}; with a constraint it must be 0")
    return tuple(found)


def fill_resources(out: frontend_pb2.Submit, resources: Sequence[Resource]) -> None:
    """Fills in the resources of a request."""
    for one in resources:
        if one.kind == CONSTRAINT:
            out.constraint, out.constraint_hash = one.source, one.hash
        else:
            out.other_resources.add(kind=one.kind, hash=one.hash, source=one.source)


def fill_needs(out: worker_pb2.StartedRows, starts: Sequence[RowStart]) -> None:
    """Fills in what the started rows need."""
    if any(start.constraint for start in starts):
        out.constraints = b"".join(start.constraint or NONE for start in starts)
    for idx, start in enumerate(starts):
        for need in start.other_needs:
            out.other_needs.add(start=idx, kind=need.kind, hash=need.hash)
