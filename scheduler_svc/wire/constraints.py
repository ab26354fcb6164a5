"""Translates what the core and workers tell each other about constraints. Owns no state."""

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.effects import DropConstraint, PrepareConstraint
from scheduler_svc.core.messages.events import CONSTRAINT_HASH_BYTES, ConstraintReady, ConstraintsOfStep
from scheduler_svc.wire.arrays import WireError, array

# In a plan, the hash of a row without a constraint.
NONE = bytes(CONSTRAINT_HASH_BYTES)
_MAX_DETAIL = 2000


def ready_of(message: pb.ConstraintReady, worker: str) -> ConstraintReady:
    if len(message.hash) != CONSTRAINT_HASH_BYTES:
        raise WireError(f"hash has {len(message.hash)} bytes; it must have {CONSTRAINT_HASH_BYTES}")
    return ConstraintReady(worker=worker, hash=message.hash, error=message.error[:_MAX_DETAIL])


def of_step(result: pb.StepResult) -> ConstraintsOfStep | None:
    """Returns what a result says of constraints; None in the usual case."""
    if not result.constraint_complete and not result.constraint_failed:
        return None
    return ConstraintsOfStep(
        complete=_indices(result.constraint_complete, "constraint_complete"),
        failed=_indices(result.constraint_failed, "constraint_failed"),
        detail=result.constraint_detail[:_MAX_DETAIL],
    )


def _indices(data: bytes, name: str) -> Int32Array:
    return array(data, np.int32, name) if data else NO_IDS


def order_frame(order: PrepareConstraint | DropConstraint) -> bytes:
    """Encodes an order to a worker."""
    message = pb.CoreToWorker()
    if isinstance(order, PrepareConstraint):
        message.prepare_constraint.hash, message.prepare_constraint.source = order.hash, order.source
    else:
        message.drop_constraint.hash = order.hash
    return message.SerializeToString()
