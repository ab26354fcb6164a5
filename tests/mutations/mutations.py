"""The faults that the mutation tests put into the core, each one or more replacements of exact text.

Owns the list. A missing or repeated text is an error, so the list must follow the core.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`edits` are (old, new); each old text occurs exactly once in the file at `path`, relative to the checkout."""

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
        "a request that leaves its row keeps its last page",
        "state/lane",
        "        self.pool.release(held)\n",
        "        self.pool.release(held[:-1] if len(held) > 1 else held)\n",
    ),
    _core(
        "a-reference-not-taken",
        "a shared page does not count its further users",
        "schedule/plan_builder",
        "        for page in matched.shared:\n            lane.pool.share(page)\n",
        "        for page in matched.shared:\n            lane.pool.references(page) or lane.pool.share(page)\n",
    ),
    _core(
        "an-indexed-page-handed-out-and-still-named",
        "an allocated page stays in the index",
        "state/page_pool",
        "                self.num_evictable -= 1\n                self._drop_hash(page)\n",
        "                self.num_evictable -= 1\n",
    ),
    # Hits ------------------------------------------------------------------------------------------------------------
    _core(
        "a-hit-one-page-too-long",
        "a prompt that ends with a page hits all of its pages",
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
        "a sample forks before its sibling has computed the prompt",
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
        "a request with cache_read false hits cached pages",
        "schedule/prefix_match",
        "    return _cached(lane, request) if request.cache_read else NO_MATCH\n",
        "    return _cached(lane, request)\n",
    ),
    _core(
        "bypass-write-ignored",
        "the prompt of a request with cache_write false is cached",
        "schedule/plan_builder",
        "        if not request.cache_write:\n            return\n",
        "",
    ),
    _core(
        "prompt-logprobs-skipped-by-a-hit",
        "positions with wanted logprobs come from the cache",
        "schedule/prefix_match",
        "        limit = min(limit, (request.prompt_logprobs_from - 1) // page_size)\n",
        "        limit = min(limit, (request.prompt_logprobs_from + page_size) // page_size)\n",
    ),
    _core(
        "a-tenants-pages-found-by-others",
        "the hash chain of a continued request starts without a root",
        "state/request",
        "self.page_hashes[-1] if self.page_hashes else self.prefix_root, tokens)",
        "self.page_hashes[-1] if self.page_hashes else bytes(32), tokens)",
    ),
    # What the index keeps ---------------------------------------------------------------------------------------------
    _core(
        "an-indexed-page-written",
        "a page is cached before it is full",
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
        "a worker that joins again with a zeroed pool keeps its index",
        "lanes",
        "_KEEPING_CAUSES = (ResetCause.STEP_FAILED, ResetCause.OUT_OF_MEMORY)\n",
        "_KEEPING_CAUSES = tuple(ResetCause)\n",
        (
            "        refusal = frame_refusal(self._config, info) or self._model_refusal(info, worker)\n",
            "        before = self.by_worker.get(worker)\n"
            "        refusal = frame_refusal(self._config, info) or self._model_refusal(info, worker)\n",
        ),
        (
            "        self.by_worker[worker] = lane\n",
            "        self.by_worker[worker] = lane\n"
            "        lane.pool = before.pool if before and before.info == info else lane.pool\n",
        ),
    ),
    _core(
        "flush-forgets-the-device-alone",
        "cached host pages survive a flush",
        "lanes",
        "lane.pool.evict_all() + lane.host.evict_all()",
        "lane.pool.evict_all()",
    ),
    # Values that are not finite ------------------------------------------------------------------------------------
    _core(
        "zeroing-forgotten",
        "unverified pages are allocated without being zeroed",
        "state/lane",
        "            self._zero_pages += self.pool.take_unverified(pages)\n",
        "            self.pool.take_unverified(pages)\n",
    ),
    _core(
        "zeroing-forgotten-by-a-reset",
        "pages that a void plan should have zeroed are not zeroed later",
        "state/page_pool",
        "        for page in pages:\n            unverified[page] = 1\n",
        "        for page in pages:\n            unverified[page] = 1 - unverified[page]\n",
    ),
    _core(
        "what-was-not-read-is-finite",
        "a request that leaves during its own step leaves a page that is never zeroed",
        "state/lane",
        "        if planned and rows.verified[row] == planned == rows.confirmed[row]:\n",
        "        if planned:\n",
    ),
    _core(
        "a-page-vouched-for-by-who-lost-it",
        "a request marks a page as finite that it no longer held",
        "state/lane",
        "            if self.holds(row, last) and last * self.info.page_size",
        "            if last * self.info.page_size",
    ),
    # Windows ---------------------------------------------------------------------------------------------------------
    _core(
        "window-freed-one-page-early",
        "the oldest page inside the window is freed",
        "state/lane",
        "return max(0, position - window + 1) // self.info.page_size if window else 0",
        "return max(0, position - window + 1 + self.info.page_size) // self.info.page_size if window else 0",
    ),
    _core(
        "sinks-freed-with-the-window",
        "sink pages are freed once the window has passed them",
        "state/lane",
        "self.sink_pages = -(-info.sink_tokens // info.page_size)",
        "self.sink_pages = info.sink_tokens // info.page_size",
    ),
    # Host memory -----------------------------------------------------------------------------------------------------
    _core(
        "host-page-reused-before-its-load",
        "a host page stays in the index after another page was saved over it",
        "state/host_pool",
        "self._free.pop() if self._free else self._pages.popitem(last=False)[1].slot",
        "self._free.pop() if self._free else next(iter(self._pages.values())).slot",
    ),
    _core(
        "saves-of-no-plan",
        "the pages of a preemption count as saved although no plan was made",
        "schedule/planner",
        "                lane.host.evict(page_hash)  # no plan copies the page there\n",
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
        "a page from host memory counts as filled but is never loaded",
        "schedule/plan_builder",
        "        self.swap_ins.append((host_page.slot, page))\n",
        "",
    ),
    # Results ---------------------------------------------------------------------------------------------------------
    _core(
        "a-stale-generation-accepted",
        "the result of a void plan is applied",
        "steps",
        "        if event.generation != lane.generation:\n",
        "        if event.generation > lane.generation:\n",
    ),
    _core(
        "epoch-ignored",
        "a result is applied to the request now in the row",
        "update/results",
        "    mine = rows.handle[named] == record.handles\n",
        "    mine = rows.handle[named] != 0\n",
    ),
    _core(
        "a-late-token-delivered-twice",
        "a preempted request is admitted while a plan in flight samples for it",
        "schedule/admit",
        "    if request.pending_plans:\n",
        "    if False:\n",
    ),
    _core(
        "a-late-token-dropped",
        "a token that arrives after its request was preempted is dropped",
        "update/results",
        "        queue.add_pending_token(request, token)\n",
        "",
    ),
    _core(
        "a-step-answered-twice",
        "a result is applied to the oldest plan without comparing steps",
        "steps",
        "        if record is None or event.step != record.step:\n",
        "        if record is None:\n",
    ),
    _core(
        "an-unsound-result-believed",
        "tokens outside the vocabulary and missing tokens are accepted",
        "steps",
        "        if not is_valid(event, record, lane.info.vocab_size):\n",
        "        if not is_valid(event, record, lane.info.vocab_size + 1) and len(event.tokens):\n",
    ),
    # Several workers and callers -----------------------------------------------------------------------------------
    _core(
        "a-front-ends-requests-outlive-it",
        "one request of a lost front end continues",
        "scheduler",
        "            for request in self.queue.by_frontend(frontend):\n",
        "            for request in self.queue.by_frontend(frontend)[1:]:\n",
    ),
    _core(
        "late-plans-of-a-lost-lane-awaited",
        "a request preempted from a lost lane waits for its plans",
        "lanes",
        "            if request is not None and not request.row:\n",
        "            if request is not None and request.row:\n",
    ),
    _core(
        "a-lane-runs-what-does-not-fit",
        "a request is routed to a worker that is too small for it",
        "messages/worker_info",
        "return total_length <= self.max_length and",
        "return",
    ),
    _core(
        "eos-one-token-early",
        "EOS ends a request one token before min_new_tokens",
        "update/results",
        "    may_end = (is_eos | rows.has_stops[rows_s]) & (known > rows.min_known[rows_s])\n",
        "    may_end = (is_eos | rows.has_stops[rows_s]) & (known > rows.min_known[rows_s] + 1)\n",
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
        "front ends do not learn that the queue is full",
        "announcer",
        "        if queue.num_waiting >= config.max_waiting:\n",
        "        if queue.num_waiting > config.max_waiting:\n",
    ),
    _core(
        "sizes-of-the-lost-stay",
        "callers receive the sizes of a worker that left",
        "lanes",
        "            self.worker_infos.update(self._proven_infos())\n        if not",
        "        if not",
    ),
)
