"""What becomes of a row's pages once a finite sample has read them: they are finite, and kept for others.

Owns nothing. Pages of a prompt are named when the plan that fills them is made, so that equal prompts of one
step share; those of an output are named here, when their step is confirmed and their tokens are known.
"""

from scheduler_svc.core.state.lane import Lane


def cache_full_pages(lane: Lane, row: int) -> None:
    """A finite sample has read the row's full pages: they are finite, and kept for others."""
    rows, pool, page_size = lane.rows, lane.pool, lane.info.page_size
    request = rows.request_at(row)
    table, hashes = rows.pages[row], request.page_hashes
    first, full = int(rows.num_cached[row]), int(rows.verified[row]) // page_size
    if rows.cache_at[row] == 1 and lane.info.window:
        rows.verified_from[row] = max(0, int(rows.verified[row]) - lane.info.window)
    verified_from = int(rows.verified_from[row])
    is_named = bool(request.prefix_root) and request.cache_write
    for page_idx in range(first, full):
        is_held = lane.holds(row, page_idx)
        page = table[page_idx]
        if is_held and page_idx * page_size >= verified_from:
            pool.mark_verified(page)
        if not is_named or (page_idx < len(hashes) and (not is_held or pool.page_with_hash(hashes[page_idx]))):
            continue
        tokens = rows.tokens_between(row, page_idx * page_size, (page_idx + 1) * page_size).tobytes()
        page_hash = hashes[page_idx] if page_idx < len(hashes) else request.add_hash(tokens)
        if is_held:
            pool.cache(page, page_hash, tokens)
    rows.num_cached[row] = full
    rows.cache_at[row] = (full + 1) * page_size
