"""Constraints of the scheduler, and the answers to them. Owns nothing."""

from collections.abc import Callable

from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.constraints.constraints import Constraints


def follow(message: pb.CoreToWorker, constraints: Constraints | None, send: Callable[[bytes], object]) -> None:
    """Begins to prepare a constraint, or forgets one. send: gets the answer if it is known at once."""
    if message.WhichOneof("message") == "drop_constraint":
        if constraints is not None:
            constraints.drop(message.drop_constraint.hash)
    elif constraints is not None:
        constraints.prepare(message.prepare_constraint.hash, message.prepare_constraint.source)
    else:
        send(_frame(message.prepare_constraint.hash, "this worker takes no constraints"))


def answers(constraints: Constraints | None) -> list[bytes]:
    """The frames of answers that have become known."""
    return [] if constraints is None else [_frame(*answer) for answer in constraints.answers()]


def _frame(hash_: bytes, error: str) -> bytes:
    return pb.WorkerToCore(constraint_ready=pb.ConstraintReady(hash=hash_, error=error)).SerializeToString()
