"""Compares the index of cached pages with the pools. Changes nothing; a broken invariant raises an AssertionError."""

from collections.abc import Sequence

from scheduler_svc.core.pages.lane_pages import LanePages


def audit_lane_pages(lanes: Sequence[LanePages]) -> None:
    """Checks the index of all lanes, and that no lane is to take over a pool with which another worker has joined."""
    if lanes:
        cached = {lane.bit: (lane.pool.cached_hashes(), lane.host.hashes()) for lane in lanes}
        assert len(cached) == len(lanes), "two lanes have one bit in the index of cached pages"
        lanes[0].index.audit(cached)
    for lane in lanes:
        others = [other.own_pool_id for other in lanes if other is not lane]
        assert lane.pending is None or lane.pending.pool_id not in others, "a pool in use is to be taken over"
