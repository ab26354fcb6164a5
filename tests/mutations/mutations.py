"""The ways in which the core is broken on purpose, each one or more replacements of exact text.

Owns the list. A text that is gone, or stands twice, is an error, so the list follows the core.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`edits` are (old, new); each old text stands exactly once in the file at `path`, from the checkout's root."""

    name: str
    breaks: str
    path: str
    edits: tuple[tuple[str, str], ...]


def _core(name: str, breaks: str, module: str, old: str, new: str, *more: tuple[str, str]) -> Mutation:
    return Mutation(name=name, breaks=breaks, path=f"scheduler_svc/core/{module}.py", edits=((old, new), *more))


MUTATIONS: tuple[Mutation, ...] = (
    # References and the free list ----------------------------------------------------------------------------------
    _core(
        "a-reference-not-dropped",
        "who leaves its row keeps its last page",
        "state/lane",
        "        self.pool.release(held)\n",
        "        self.pool.release(held[:-1] if len(held) > 1 else held)\n",
    ),
    _core(
        "a-reference-not-taken",
        "a shared page is not counted for who shares it",
        "schedule/plan_builder",
        "        for page in matched.shared:\n            lane.pool.share(page)\n",
        "        for page in matched.shared:\n            lane.pool.references(page) or lane.pool.share(page)\n",
    ),
    _core(
        "an-indexed-page-handed-out-and-still-named",
        "a page that is handed out stays in the index",
        "state/page_pool",
        "                self.num_evictable -= 1\n                self._drop_hash(page)\n",
        "                self.num_evictable -= 1\n",
    ),
    # Hits ------------------------------------------------------------------------------------------------------------
    _core(
        "a-hit-one-page-too-long",
        "a prompt that ends with a page is hit to its end",
        "schedule/prefix_match",
        "limit = min((request.known - 1) // page_size, len(request.page_hashes))",
        "limit = min(request.known // page_size, len(request.page_hashes))",
    ),
    _core(
        "a-hit-one-token-too-long",
        "a fork copies a token that its source has not computed",
        "schedule/prefix_match",
        "fork=(table[full], rest) if rest else None)",
        "fork=(table[full], rest + 1) if rest else None)",
    ),
    _core(
        "a-fork-from-who-has-not-computed-it",
        "a sample forks before its sibling has computed their prompt",
        "schedule/prefix_match",
        "        if rows.planned[row] < last:\n",
        "        if rows.planned[row] < last - page_size:\n",
    ),
    _core(
        "a-copy-forgotten",
        "a fork starts in a page that nothing was copied to",
        "schedule/plan_builder",
        "            self.copies.append((source, pages[len(matched.pages)], num_tokens))\n",
        "            pass\n",
    ),
    _core(
        "bypass-read-ignored",
        "who wants nothing that was kept gets it",
        "schedule/prefix_match",
        "    return _kept(lane, request) if request.cache_read else NO_MATCH\n",
        "    return _kept(lane, request)\n",
    ),
    _core(
        "bypass-write-ignored",
        "the prompt of who wants nothing kept is kept",
        "schedule/plan_builder",
        "        if not request.cache_write:\n            return\n",
        "",
    ),
    _core(
        "prompt-logprobs-skipped-by-a-hit",
        "positions whose logprobs are wanted come from the cache",
        "schedule/prefix_match",
        "        limit = min(limit, (request.prompt_logprobs_from - 1) // page_size)\n",
        "        limit = min(limit, (request.prompt_logprobs_from + page_size) // page_size)\n",
    ),
    _core(
        "a-tenants-pages-found-by-others",
        "the hash chain of a request that continues begins at no root",
        "state/request",
        "self.page_hashes[-1] if self.page_hashes else self.prefix_root, tokens)",
        "self.page_hashes[-1] if self.page_hashes else bytes(32), tokens)",
    ),
    # What the index keeps ---------------------------------------------------------------------------------------------
    _core(
        "an-indexed-page-written",
        "a page is kept for others before it is full",
        "schedule/plan_builder",
        "min((start + count) // page_size, len(hashes))",
        "min(-(-(start + count) // page_size), len(hashes))",
    ),
    _core(
        "unconfirmed-entries-kept-over-a-reset",
        "pages of a step that failed stay in the index",
        "state/lane",
        "        for page, page_hash in record.cached:\n            if self.pool.hash_of(page) == page_hash:\n",
        "        for page, page_hash in record.cached:\n            if not page:\n",
    ),
    _core(
        "unconfirmed-saves-kept-over-a-reset",
        "host pages of a step that failed stay in the index",
        "state/lane",
        "        for page_hash in record.swapped_out:\n            self.host.evict(page_hash)\n",
        "",
    ),
    _core(
        "index-kept-over-a-lost-worker",
        "a worker that joins again, its pool zeroed, is taken to hold what it held",
        "lanes",
        "_KEEPING_CAUSES = (ResetCause.STEP_FAILED, ResetCause.OUT_OF_MEMORY)\n",
        "_KEEPING_CAUSES = tuple(ResetCause)\n",
        (
            "        refusal = self._frame_too_large(info) or self._difference(info, worker)\n",
            "        before = self.by_worker.get(worker)\n"
            "        refusal = self._frame_too_large(info) or self._difference(info, worker)\n",
        ),
        (
            "        self.by_worker[worker] = lane\n",
            "        self.by_worker[worker] = lane\n"
            "        lane.pool = before.pool if before and before.info == info else lane.pool\n",
        ),
    ),
    _core(
        "flush-forgets-the-device-alone",
        "what host memory holds survives a flush",
        "lanes",
        "lane.pool.evict_all() + lane.host.evict_all()",
        "lane.pool.evict_all()",
    ),
    # Values that are not finite ------------------------------------------------------------------------------------
    _core(
        "zeroing-forgotten",
        "pages that may hold values which are not finite are handed out as they are",
        "state/lane",
        "            self._zero_pages += self.pool.take_unverified(pages)\n",
        "            self.pool.take_unverified(pages)\n",
    ),
    _core(
        "zeroing-forgotten-by-a-reset",
        "pages that a void plan was to zero are not zeroed later",
        "state/page_pool",
        "        for page in pages:\n            unverified[page] = 1\n",
        "        for page in pages:\n            unverified[page] = 1 - unverified[page]\n",
    ),
    _core(
        "what-was-not-read-is-finite",
        "who leaves while a step of its own is in flight leaves a page that nobody zeroes",
        "state/lane",
        "        if planned and rows.verified[row] == planned == rows.confirmed[row]:\n",
        "        if planned:\n",
    ),
    _core(
        "a-page-vouched-for-by-who-lost-it",
        "who leaves its row says that a page is finite which it held no longer",
        "state/lane",
        "            if self.holds(row, last) and last * self.info.page_size",
        "            if last * self.info.page_size",
    ),
    # Windows ---------------------------------------------------------------------------------------------------------
    _core(
        "window-freed-one-page-early",
        "the oldest page that the window still sees is given to others",
        "state/lane",
        "return max(0, position - window + 1) // self.info.page_size if window else 0",
        "return max(0, position - window + 1 + self.info.page_size) // self.info.page_size if window else 0",
    ),
    _core(
        "sinks-freed-with-the-window",
        "the first pages are given to others once the window has passed them",
        "state/lane",
        "self.sink_pages = -(-info.sink_tokens // info.page_size)",
        "self.sink_pages = info.sink_tokens // info.page_size",
    ),
    # Host memory -----------------------------------------------------------------------------------------------------
    _core(
        "host-page-reused-before-its-load",
        "what a host page held is still found there after another was saved over it",
        "state/host_pool",
        "self._free.pop() if self._free else self._pages.popitem(last=False)[1].slot",
        "self._free.pop() if self._free else next(iter(self._pages.values())).slot",
    ),
    _core(
        "saves-of-no-plan",
        "what a preemption was to save counts as saved though no plan was made",
        "schedule/planner",
        "                lane.host.evict(page_hash)  # no plan carries it there\n",
        "                pass\n",
    ),
    _core(
        "a-fork-of-what-the-plan-computes",
        "a fork copies from pages that the same plan fills",
        "schedule/prefix_match",
        "        elif row not in newly_seated and rows.held_from[row] <=",
        "        elif rows.held_from[row] <=",
    ),
    _core(
        "host-page-lost-within-a-plan",
        "a plan saves two pages to one host page",
        "state/lane",
        "            if num_written + len(swap_outs) >= self.host.num_slots:\n                break\n",
        "",
    ),
    _core(
        "a-load-forgotten",
        "a page that host memory has is taken as filled and never loaded",
        "schedule/plan_builder",
        "        self.swap_ins.append((host_page.slot, page))\n",
        "",
    ),
    # Results ---------------------------------------------------------------------------------------------------------
    _core(
        "a-stale-generation-accepted",
        "the result of a plan that became void is read",
        "lanes",
        "        if event.generation != lane.generation:\n",
        "        if event.generation > lane.generation:\n",
    ),
    _core(
        "epoch-ignored",
        "a result is read against whoever sits in the row now",
        "update/results",
        "    mine = rows.handle[named] == record.handles\n",
        "    mine = rows.handle[named] != 0\n",
    ),
    _core(
        "a-late-token-delivered-twice",
        "a preempted request is admitted while a plan in flight samples for it",
        "schedule/admit",
        "        if request.pending_plans:\n            if lane.awaits",
        "        if False:\n            if lane.awaits",
    ),
    _core(
        "a-late-token-dropped",
        "a token that came after its request had lost its row is not kept",
        "update/results",
        "        queue.add_pending_token(request, token)\n",
        "",
    ),
    _core(
        "a-step-answered-twice",
        "a result is read against the oldest plan whatever its step is",
        "lanes",
        "        if record is None or event.step != record.step:\n",
        "        if record is None:\n",
    ),
    _core(
        "an-unsound-result-believed",
        "tokens outside the vocabulary and too few of them are taken",
        "lanes",
        "        if not is_valid(event, record, lane.info.vocab_size):\n",
        "        if not is_valid(event, record, lane.info.vocab_size + 1) and len(event.tokens):\n",
    ),
    # Several workers and callers -----------------------------------------------------------------------------------
    _core(
        "a-front-ends-requests-outlive-it",
        "one request of a front end that is gone goes on",
        "scheduler",
        "            for request in self.queue.by_frontend(frontend):\n",
        "            for request in self.queue.by_frontend(frontend)[1:]:\n",
    ),
    _core(
        "late-plans-of-a-lost-lane-awaited",
        "who was preempted from a lane that is gone waits for its plans",
        "lanes",
        "            if request is not None and not request.row:\n",
        "            if request is not None and request.row:\n",
    ),
    _core(
        "a-lane-runs-what-does-not-fit",
        "a request goes to a worker that is too small for it",
        "messages/worker_info",
        "return total_length <= self.max_length and",
        "return",
    ),
    _core(
        "eos-one-token-early",
        "a model's own end counts before min_new_tokens are out",
        "update/results",
        "    suspicious = (is_eos | rows.has_stops[rows_s]) & (known > rows.min_known[rows_s])\n",
        "    suspicious = (is_eos | rows.has_stops[rows_s]) & (known > rows.min_known[rows_s] + 1)\n",
    ),
    _core(
        "plan-without-a-size",
        "a plan starts every row that fits, however many bytes they take",
        "schedule/plan_builder",
        "        self.bytes_left -= start_bytes(request, len(pages))\n",
        "",
    ),
    _core(
        "requests-for-a-worker-on-probation",
        "a worker gets requests before it has confirmed a step",
        "lanes",
        "        if not self._config.prove_workers:\n",
        "        if True:\n",
    ),
    _core(
        "queue-full-not-announced",
        "front ends are not told that the queue is full",
        "announcer",
        "        if queue.num_waiting >= config.max_waiting:\n",
        "        if queue.num_waiting > config.max_waiting:\n",
    ),
    _core(
        "sizes-of-the-lost-stay",
        "callers are told the sizes of a worker that left",
        "lanes",
        "            self.worker_infos.update(self._proven_infos())\n        if not",
        "        if not",
    ),
)
