"""Marks full pages of a row as verified and caches them after a step that attended to them gave finite logits.

Pages with output tokens enter the prefix cache here, because their tokens are not known before the result arrives. The
pages of a prompt enter it earlier, when the plan that fills them is made (`plan_builder`), so that requests with equal
prompts share them within one step.
"""

from scheduler_svc.core.state.lane import Lane


def cache_full_pages(lane: Lane, row: int) -> None:
    """Marks and caches the pages of the row that became full and verified since the last call."""
    rows, pool, page_size = lane.rows, lane.pool, lane.info.page_size
    request = rows.request_at(row)
    table, hashes = rows.pages[row], request.page_hashes
    first, full = int(rows.num_cached[row]), int(rows.verified[row]) // page_size
    if rows.cache_at[row] == 1 and lane.info.window:
        # Finite logits of the first sampled token verify only the positions in its window; `verified_from` excludes the
        # earlier ones.
        rows.verified_from[row] = max(0, int(rows.verified[row]) - lane.info.window)
    verified_from = int(rows.verified_from[row])
    labels = lane.pages.labels
    may_cache = bool(request.prefix_root) and request.cache_write and not request.weights.keeps_pages
    for page_idx in range(first, full):
        is_held = lane.holds(row, page_idx)
        page = table[page_idx]
        if is_held and page_idx * page_size >= verified_from:
            if labels.is_on and pool.is_unverified(page):
                labels.add(page)
            pool.mark_verified(page)
        if not may_cache or (page_idx < len(hashes) and (not is_held or pool.page_with_hash(hashes[page_idx]))):
            continue
        # A page behind the window is not cached, but the hashes of the pages after it depend on its hash.
        tokens = rows.tokens_between(row, page_idx * page_size, (page_idx + 1) * page_size).tobytes()
        page_hash = hashes[page_idx] if page_idx < len(hashes) else request.add_hash(tokens)
        if is_held:
            pool.cache(page, page_hash, tokens)
    rows.num_cached[row] = full
    rows.cache_at[row] = (full + 1) * page_size
