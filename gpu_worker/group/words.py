"""What the ranks of a group have in common: the names of their sockets and of each other, and the words of the leader.

A message of the leader is its kind and, for `FRAME`, the bytes that it got from the scheduler. Imports no torch.
"""

import re
from pathlib import Path

FRAME, HELLO, STOP = b"frame", b"hello", b"stop"
# There are at most two plans in flight; a longer queue means that the rank is gone.
HIGH_WATER_MARK = 64
# The exit code of a rank that ends because another one is lost: the launcher starts the group again.
GROUP_LOST = 3


class RankLost(RuntimeError):
    """A rank of the group is gone, or failed alone."""


def endpoint_of(runtime_dir: Path, group: str, purpose: str) -> str:
    """A socket of the leader. group: its name on this host."""
    return f"ipc://{runtime_dir}/group-{re.sub(r'[^A-Za-z0-9]+', '-', group)[:32]}-{purpose}.sock"


def name_of(rank: int) -> bytes:
    """A follower's routing id."""
    return b"rank-%d" % rank


def rank_of(name: bytes) -> int | None:
    """The rank with this routing id."""
    digits = name.removeprefix(b"rank-")
    return int(digits) if digits.isdigit() else None
