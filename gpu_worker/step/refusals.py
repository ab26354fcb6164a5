"""What a plan is answered whose step raised an exception."""

import logging

import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.failures import first_line
from gpu_worker.shared_pool.errors import PoolError
from gpu_worker.wire.fields import PlanError

log = logging.getLogger(__name__)


def refusal_of(error: Exception, step: int) -> tuple["pb.StepStatus", str]:
    """Returns the status and the detail for people. Logs an error that nobody expected."""
    if isinstance(error, PlanError):
        return pb.STEP_STATUS_FAILED, str(error)
    if isinstance(error, PoolError):
        return pb.STEP_STATUS_OUT_OF_SYNC, str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return pb.STEP_STATUS_OUT_OF_MEMORY, first_line(error)
    log.error("step %d failed", step, exc_info=error)
    no_memory = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    status = pb.STEP_STATUS_OUT_OF_MEMORY if no_memory else pb.STEP_STATUS_FAILED
    return status, f"{type(error).__name__}: {first_line(error)}"
