"""What the ranks of a group say to each other besides collectives: frames of the scheduler, signs of life, the end.

Owns the messages, the addresses, and the times after which a silent rank is given up. A message is one or two ZeroMQ
frames: its kind, and for `FRAME` the bytes that the leader got from the scheduler. Imports no torch.
"""

from pathlib import Path

FRAME, BEAT, STOP = b"frame", b"beat", b"stop"
BEAT_SECONDS = 0.5
# Of a rank that is not in a step.
SILENCE_SECONDS = 2.0
# There are at most two plans in flight; a longer queue means that the rank is gone.
HIGH_WATER_MARK = 64
# The exit code of a rank that ends because another one is lost: the launcher starts the group again.
GROUP_LOST = 3


def endpoint_of(runtime_dir: Path, launcher_pid: int) -> str:
    """The leader's socket; each group on a host has its launcher's number."""
    return f"ipc://{runtime_dir}/group-{launcher_pid}.sock"


class RankLost(RuntimeError):
    """A rank of the group is gone or silent."""


def name_of(rank: int) -> bytes:
    """A follower's routing id."""
    return b"rank-%d" % rank


def rank_of(name: bytes) -> int | None:
    """The rank with this routing id."""
    digits = name.removeprefix(b"rank-")
    return int(digits) if digits.isdigit() else None
