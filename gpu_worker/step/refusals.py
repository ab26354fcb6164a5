"""The answer to a plan after its step raised an exception. Imports no torch: a group asks before it has loaded it."""

import logging

from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.failures import first_line, is_out_of_memory
from gpu_worker.shared_pool.messages import PoolError
from gpu_worker.wire.fields import PlanError

log = logging.getLogger(__name__)


class OutOfSync(Exception):
    """Plans have a gap, or the row tables of the scheduler and of the worker differ."""


def refusal_of(error: Exception, step: int) -> tuple["pb.StepStatus.ValueType", str]:
    """Returns the status and the detail for people. Logs an unexpected error."""
    if isinstance(error, PlanError):
        return pb.STEP_STATUS_FAILED, str(error)
    if isinstance(error, (OutOfSync, PoolError)):
        return pb.STEP_STATUS_OUT_OF_SYNC, str(error)
    detail, no_memory = f"{type(error).__name__}: {first_line(error)}", is_out_of_memory(error)
    # Until the line is written, its traceback would keep the step's tensors.
    log.error("step %d failed: %s", step, detail, exc_info=None if no_memory else error)
    return pb.STEP_STATUS_OUT_OF_MEMORY if no_memory else pb.STEP_STATUS_FAILED, detail
