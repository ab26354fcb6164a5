"""Releases pages behind the attention window while their row runs."""

import numpy as np

from scheduler_svc.core.state.lane import Lane


def free_behind_windows(lane: Lane) -> None:
    """Releases each row's pages that neither its next position nor a later one reads."""
    info, rows = lane.info, lane.rows
    if not info.window:
        return
    seated = rows.seated()
    seen = np.minimum((rows.planned[seated] - info.window + 1) // info.page_size, rows.num_pages[seated])
    start = np.maximum(rows.held_from[seated], lane.sink_pages)
    for i in np.flatnonzero(seen > start).tolist():
        row = int(seated[i])
        lane.pool.release(rows.pages[row][start[i] : seen[i]])
        rows.held_from[row] = seen[i]
