"""Which failures a group survives, how a rank learns that another one is gone, and the exit codes of ranks.

What every rank finds in the same bytes before any device work is answered as a worker of one process does: a plan that
is wrong, a gap, another checksum. Everything else may have met one rank alone, after others have entered a collective
call that it will never make, so the rank ends and with it the group.
"""

from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.step.refusals import OutOfSync, refusal_of
from gpu_worker.wire.fields import PlanError

# The exit code of a rank that ends because another one is lost: the launcher starts the group again.
GROUP_LOST = 3
# The exit codes of a rank that cannot serve, with which the launcher ends too.
REFUSED_CODES = (1, 2)
# The words of gloo and NCCL. Their errors have no type of their own.
_OF_PEERS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "ProcessGroup")


class RankLost(RuntimeError):
    """A rank of the group is gone, or failed alone."""


def refusal_in_group(error: Exception, step: int) -> tuple["pb.StepStatus.ValueType", str]:
    """As `refusal_of`, for errors that all ranks have. Raises RankLost for others."""
    if is_lost_peer(error):
        raise RankLost(f"another rank ended in step {step}") from error
    refusal = refusal_of(error, step)
    if not isinstance(error, PlanError | OutOfSync):
        raise RankLost(f"step {step} failed on this rank: {type(error).__name__}") from error
    return refusal


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective call failed because another rank is gone."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_PEERS)
