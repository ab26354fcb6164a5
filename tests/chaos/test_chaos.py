"""A short chaos run: every kind of fault at least once. `make chaos` is the long one."""

from tests.chaos.faults import FAULTS
from tests.chaos.run import Options, chaos


def test_no_stream_is_lost_repeated_or_changed_whoever_dies() -> None:
    counts = chaos(Options(seed=13, kills=4, streams=10, pace=0.1, step_ms=6), print)
    assert all(counts[fault.name] for fault in FAULTS), counts
    assert counts["kills of workers with a plan in flight"] >= 4
    assert counts["hangs"] == counts["workers stopped in a step"] + counts["workers hung in a step"]
    assert counts["streams equal to the oracle"] > 20, counts
