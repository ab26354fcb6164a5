"""Pages that a running row gives up: those behind its attention window, and those that are swapped out."""

import numpy as np

from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


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


def swap_out(lane: Lane, request: Request, num_written: int) -> list[tuple[int, int, bytes]]:
    """Assigns host pages to the cached pages that only this running request holds, for the plan being made.

    Returns (page, host page, hash) for each. `num_written` is the number of host pages that the plan writes
    already. The plan must not write a host page twice, so it writes at most as many as the pool has.
    """
    swap_outs: list[tuple[int, int, bytes]] = []
    table = lane.rows.pages[request.row]
    for page_idx, page_hash in enumerate(request.page_hashes[: len(table)]):
        if num_written + len(swap_outs) >= lane.host.num_slots:
            break
        page = table[page_idx]
        # A page that other rows share stays on the device.
        if lane.pool.hash_of(page) != page_hash or lane.pool.references(page) != 1:
            continue
        slot = lane.host.store(page_hash, lane.pool.tokens(page), unverified=lane.pool.is_unverified(page))
        if slot is not None:
            swap_outs.append((page, slot, page_hash))
    return swap_outs
