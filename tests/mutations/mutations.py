"""The faults that the mutation tests put into the core, each one or more edits of definitions in one module.

Owns the list. An edit names a definition and a place in it by what the code does there, so the list follows the core
only if a definition, a method or an attribute that it names changes.
"""

from tests.mutations.edits import (
    Edit,
    argument,
    assigned,
    attribute,
    call,
    comparison,
    condition,
    constant,
    difference,
    drop,
    insert_after,
    insert_before,
    membership,
    replace,
    returned,
)
from tests.mutations.mutation import Mutation


def _core(name: str, breaks: str, module: str, *edits: Edit) -> Mutation:
    return Mutation(name=name, breaks=breaks, module=f"scheduler_svc.core.{module}", edits=edits)


MUTATIONS: tuple[Mutation, ...] = (
    # References and the free list -------------------------------------------------------------------------------------
    _core(
        "a-reference-not-dropped",
        "a request that leaves its row keeps its last page",
        "state.lane",
        replace("Lane.unseat", argument("release", 0), "it[:-1] if len(it) > 1 else it"),
    ),
    _core(
        "a-reference-not-taken",
        "a shared page does not count its further users",
        "schedule.plan_builder",
        replace("PlanBuilder.seat", call("pool.share"), "owner.references(argument) or it"),
    ),
    _core(
        "an-indexed-page-handed-out-and-still-named",
        "an allocated page stays in the index",
        "pages.page_pool",
        drop("PagePool.allocate", call("_drop_hash")),
    ),
    # Hits -------------------------------------------------------------------------------------------------------------
    _core(
        "a-hit-one-page-too-long",
        "a prompt that ends with a page hits all of its pages",
        "schedule.prefix_match",
        replace("cached_limit", difference("known"), "left"),
    ),
    _core(
        "a-hit-one-token-too-long",
        "a fork copies a token that its source has not computed",
        "schedule.prefix_match",
        replace("_forked", argument("PrefixMatch", "fork"), "it and (it[0], it[1] + 1)"),
    ),
    _core(
        "a-fork-from-who-has-not-computed-it",
        "a sample forks before its sibling has computed the prompt",
        "schedule.prefix_match",
        replace("_forked", comparison("planned"), "left < right - lane.info.page_size"),
    ),
    _core(
        "a-copy-forgotten",
        "a fork starts in a page that nothing was copied to",
        "schedule.plan_builder",
        drop("PlanBuilder.seat", call("copies.append")),
    ),
    _core(
        "bypass-read-ignored",
        "a request with cache_read false hits cached pages",
        "schedule.prefix_match",
        replace("cached_limit", condition("cache_read"), "False"),
    ),
    _core(
        "bypass-write-ignored",
        "the prompt of a request with cache_write false is cached",
        "schedule.plan_builder",
        replace("PlanBuilder.chunk", condition("cache_write"), "False"),
    ),
    _core(
        "prompt-logprobs-skipped-by-a-hit",
        "positions with wanted logprobs come from the cache",
        "schedule.prefix_match",
        replace("cached_limit", difference("prompt_logprobs_from"), "left + page_size"),
    ),
    _core(
        "a-tenants-pages-found-by-others",
        "the hash chain of a continued request starts without a root",
        "state.request",
        replace("Request.add_hash", attribute("prefix_root"), "bytes(32)"),
    ),
    # What the index keeps ---------------------------------------------------------------------------------------------
    _core(
        "an-indexed-page-written",
        "a page is cached before it is full",
        "schedule.plan_builder",
        replace("PlanBuilder.chunk", argument("min", 0), "-(-left // right)"),
    ),
    _core(
        "unconfirmed-entries-kept-over-a-reset",
        "pages of a step that failed stay in the index",
        "state.lane",
        replace("evict_pages_of", condition("hash_of"), "False"),
    ),
    _core(
        "unconfirmed-saves-kept-over-a-reset",
        "host pages of a step that failed stay in the index",
        "state.lane",
        drop("evict_pages_of", call("host.evict")),
    ),
    _core(
        "index-kept-over-a-lost-worker",
        "a worker that joins again with a zeroed pool keeps its index",
        "workers.lanes",
        replace("_KEEPING_CAUSES", assigned("_KEEPING_CAUSES"), "tuple(ResetCause)"),
        insert_before("Lanes.join", call("frame_refusal"), "before = self.by_worker.get(event.worker)"),
        insert_after(
            "Lanes.join",
            assigned("by_worker"),
            "if before and before.info == event.info: self.by_worker[event.worker].pool = before.pool",
        ),
    ),
    _core(
        "flush-forgets-the-device-alone",
        "cached host pages survive a flush",
        "workers.lanes",
        replace("flush", call("host.evict_all"), "0"),
    ),
    # Values that are not finite ---------------------------------------------------------------------------------------
    _core(
        "zeroing-forgotten",
        "unverified pages are allocated without being zeroed",
        "pages.lane_pages",
        replace("LanePages.allocate", assigned("_zero_pages"), "it and []"),
    ),
    _core(
        "zeroing-forgotten-by-a-reset",
        "pages that a void plan should have zeroed are not zeroed later",
        "pages.page_pool",
        replace("PagePool.take_unverified", constant(1), "1 - target"),
    ),
    _core(
        "what-was-not-read-is-finite",
        "a request that leaves during its own step leaves a page that is never zeroed",
        "state.lane",
        replace("Lane.unseat", condition("verified"), "left"),
    ),
    _core(
        "a-page-vouched-for-by-who-lost-it",
        "a request marks a page as finite that it no longer held",
        "state.lane",
        replace("Lane.unseat", call("self.holds"), "True"),
    ),
    # Windows ----------------------------------------------------------------------------------------------------------
    _core(
        "window-freed-one-page-early",
        "the oldest page inside the window is freed",
        "state.lane",
        replace("Lane.first_seen_page", argument("max", 1), "it + self.info.page_size"),
    ),
    _core(
        "sinks-freed-with-the-window",
        "sink pages are freed once the window has passed them",
        "state.lane",
        replace("Lane.__init__", assigned("sink_pages"), "info.sink_tokens // info.page_size"),
    ),
    # Host memory ------------------------------------------------------------------------------------------------------
    _core(
        "host-page-reused-before-its-load",
        "a host page stays in the index after another page was saved over it",
        "pages.host_pool",
        replace("HostPool.store", call("evict"), "owner._free.append(next(iter(owner._pages.values())).slot)"),
    ),
    _core(
        "saves-of-no-plan",
        "the pages of a preemption count as saved although no plan was made",
        "schedule.planner",
        drop("plan_step", call("host.evict")),
    ),
    _core(
        "a-fork-of-what-the-plan-computes",
        "a fork copies from pages that the same plan fills",
        "schedule.prefix_match",
        replace("_forked", membership, "True"),
    ),
    _core(
        "host-page-lost-within-a-plan",
        "a plan saves two pages to one host page",
        "state.lane",
        replace("swap_out", condition("num_slots"), "False"),
    ),
    _core(
        "a-load-forgotten",
        "a page from host memory counts as filled but is never loaded",
        "schedule.plan_builder",
        drop("PlanBuilder._swap_in", call("swap_ins.append")),
    ),
    # Results ----------------------------------------------------------------------------------------------------------
    _core(
        "a-stale-generation-accepted",
        "the result of a void plan is applied",
        "steps",
        replace("Steps.read", condition("generation"), "left > right"),
    ),
    _core(
        "epoch-ignored",
        "a result is applied to the request now in the row",
        "update.results",
        replace("read_result", comparison("handles"), "left != 0"),
    ),
    _core(
        "a-late-token-delivered-twice",
        "a preempted request is admitted while a plan in flight samples for it",
        "schedule.admit",
        replace("_judge", condition("pending_plans"), "False"),
    ),
    _core(
        "a-late-token-dropped",
        "a token that arrives after its request was preempted is dropped",
        "update.results",
        drop("_pending", call("add_pending_token")),
    ),
    _core(
        "a-step-answered-twice",
        "a result is applied to the oldest plan without comparing steps",
        "steps",
        replace("Steps.read", comparison("step"), "False"),
    ),
    _core(
        "an-unsound-result-believed",
        "tokens outside the vocabulary and missing tokens are accepted",
        "steps",
        replace("Steps.read", argument("is_valid", 2), "it + 1"),
        replace("Steps.read", condition("is_valid"), "it and len(event.tokens)"),
    ),
    # Several workers and callers --------------------------------------------------------------------------------------
    _core(
        "a-front-ends-requests-outlive-it",
        "one request of a lost front end continues",
        "scheduler",
        replace("Scheduler._drop_frontend", call("by_frontend"), "it[1:]"),
    ),
    _core(
        "late-plans-of-a-lost-lane-awaited",
        "a request preempted from a lost lane waits for its plans",
        "workers.lanes",
        replace("Lanes.reset", condition("row"), "left and not right"),
    ),
    _core(
        "a-lane-runs-what-does-not-fit",
        "a request is routed to a worker that is too small for it",
        "messages.worker_info",
        replace("WorkerInfo.holds", returned, "right"),
    ),
    _core(
        "eos-one-token-early",
        "EOS ends a request one token before min_new_tokens",
        "update.results",
        replace("_seated", comparison("min_known"), "left > right + 1"),
    ),
    _core(
        "plan-without-a-size",
        "a plan starts every row that fits, however many bytes they take",
        "schedule.plan_builder",
        drop("PlanBuilder.seat", assigned("bytes_left")),
    ),
    _core(
        "requests-for-a-worker-on-probation",
        "a worker gets requests before it has confirmed a step",
        "workers.lanes",
        replace("Lanes.join", condition("prove_workers"), "True"),
    ),
    _core(
        "queue-full-not-announced",
        "front ends do not learn that the queue is full",
        "announcer",
        replace("Announcer._queue_full", comparison("max_waiting"), "left > right"),
    ),
    _core(
        "sizes-of-the-lost-stay",
        "callers receive the sizes of a worker that left",
        "workers.lanes",
        drop("Lanes.close", call("worker_infos.update")),
    ),
    _core(
        "a-zeroed-pool-taken-over",
        "a pool is kept although its worker joined again and zeroed it",
        "workers.held_pools",
        replace("HeldPools.forget", call("_held.pop"), "None"),
    ),
    _core(
        "a-pool-in-use-promised-to-a-lane",
        "a lane keeps the pool that it was to take over although its worker has joined again",
        "workers.held_pools",
        drop("HeldPools.forget", call("drop_take_over")),
    ),
    _core(
        "an-evicted-page-in-the-index-of-lanes",
        "the index of all lanes keeps a page that a lane has evicted",
        "pages.page_pool",
        drop("PagePool._drop_hash", call("_place.remove")),
    ),
    _core(
        "a-suspect-in-two-groups",
        "a suspect whose trial has moved is put into a second group",
        "suspicion.suspects",
        replace("Suspects._regroup", condition("trial"), "True"),
    ),
)
