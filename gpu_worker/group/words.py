"""What the ranks of a group have in common: the names of their sockets and of each other, words and exit codes.

A message of the leader is its kind and, for `FRAME`, the bytes that it got from the scheduler. Imports no torch.
"""

FRAME, HELLO, STOP = b"frame", b"hello", b"stop"
# The sockets between two ranks.
PURPOSES = ("frames", "signs")
# There are at most two plans in flight; a longer queue means that the rank is gone.
HIGH_WATER_MARK = 64
# The exit code of a rank that ends because another one is lost: the launcher starts the group again.
GROUP_LOST = 3
# The exit codes of a rank that cannot serve, with which the launcher ends too.
REFUSED_CODES = (1, 2)
# Set by the launcher of a group on one host: the file in which its ranks find each other.
STORE_VARIABLE = "_TANDEM_RANKS"


class RankLost(RuntimeError):
    """A rank of the group is gone, or failed alone."""


def name_of(rank: int) -> bytes:
    """A follower's routing id."""
    return b"rank-%d" % rank


def rank_of(name: bytes) -> int | None:
    """The rank with this routing id."""
    digits = name.removeprefix(b"rank-")
    return int(digits) if digits.isdigit() else None
