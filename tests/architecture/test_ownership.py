"""Each piece of the core's state has an owner: the room with code that may store into it, and rooms that may call it.

A room is a folder or a module under `scheduler_svc/core`. A class belongs to the room that defines it. Code of another
room may store only what `STORES` names, and call methods that write, directly or through others, only as `CALLS` says.
`scheduler`, which has all objects, may call each. Both tables are exact: a room that does not write is not named.
"""

import ast
import copy
import functools
from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.architecture.core_source import Function
from tests.architecture.effects import Effects, Write
from tests.architecture.source import files, tree

STORES = {
    "Core.frontends": "front_ends",
    "Core.is_stop_wanted": "operations",
    "Core.is_stopping": "operations",
    "Core.stop_at": "operations",
    "Core.weights": "operations",
    "Counters.hung_workers": "recovery",
    "Counters.memory_reductions": "recovery",
    "Counters.preemptions": "lanes schedule",
    "Counters.resets_by_cause": "lanes",
    "HeldPools.num_damaged": "steps",
    "LabelQueue.is_on": "recovery",
    "Lane.failed_steps": "lanes",
    "LanePages.pool_id": "state",
    "LaneSchedule.blocked": "schedule",
    "LaneSchedule.has_preempted": "schedule",
    "LaneSchedule.lookups": "operations schedule",
    "LaneWeights.refusal": "operations",
    "LaneWeights.retry_at": "operations",
    "LaneWeights.running": "operations",
    "LaneWeights.ordered": "operations",
    "LaneWeights.until": "operations recovery",
    "OutputWeights.keeps_pages": "operations",
    "Request.first_token_at": "schedule",
    "Request.frontend": "queue",
    "Request.has_wait_deadline": "core requests",
    "Request.last_token_at": "core",
    "Request.passed_over": "schedule",
    "Request.pending_plans": "schedule",
    "Request.stream": "queue",
    "Request.turn": "queue",
    "Request.worker_wait_since": "core",
    "Suspects.is_next": "steps",
    "Suspects.waits_until": "schedule",
}
"""The rooms other than the class's own that store into an attribute."""
CALLS = {
    "Accepted": "requests",
    "Account": "core requests",
    "Accounts": "requests schedule",
    "Availability": "front_ends",
    "Core": "front_ends operations preparations recovery requests steps suspicion",
    "Counters": "schedule steps",
    "CrashLoop": "steps suspicion",
    "HeldPools": "lanes operations steps",
    "HostPool": "operations schedule state",
    "KeptRequests": "core requests",
    "LabelQueue": "operations schedule state",
    "Lane": "core lanes operations preparations recovery schedule steps",
    "LanePages": "lanes operations recovery schedule state",
    "LanePhases": "lanes operations",
    "LaneResources": "preparations recovery sources",
    "LaneSchedule": "schedule",
    "Lanes": "core operations recovery steps",
    "MemoryLimit": "recovery",
    "OutputCollector": "core steps",
    "OutputWeights": "operations requests",
    "PagePool": "operations recovery schedule state",
    "Quarantine": "operations",
    "Request": "core lanes queue requests schedule",
    "RequestQueue": "core lanes operations requests schedule suspicion",
    "Rows": "requests schedule",
    "Sources": "core requests",
    "StepClock": "operations recovery steps",
    "Suspects": "core lanes requests schedule steps",
    "Waits": "front_ends requests",
    "WorkerInfos": "lanes operations recovery",
}
"""The rooms other than the class's own that call methods which write its objects."""
CACHES = frozenset(
    {
        *("AdmissionOrder._cached_pages", "AdmissionOrder._first", "AdmissionOrder._waiting"),
        *("LaneSchedule.lookups", "Placement._num_rows", "PlanBuilder._logit_rows", "Request.page_hashes"),
        *("StepClock._oldest", "StepClock._prediction", "StepClock._work"),
        # Tenants without a waiting request are dropped when they are met.
        *("RequestQueue._active", "RequestQueue._merged", "RequestQueue._num_merged"),
    }
)
"""Caches: the core could compute their content again. A function that reads one may fill it, and is not a writer."""
UNFOLLOWED = {
    "figures",
    # Of the table of kinds.
    "kind.refusal",
    "may_run",
    "need.of_kind.refusal",
    "report",
    "self._handlers[type(event)]",
    "self._is_live",
}
"""Calls of what an object was given. Whether these write is not known."""


@functools.cache
def core() -> Effects:
    return Effects({path: tree(path) for path in files("scheduler_svc/core")}, CACHES)


def foreign(program: Effects) -> dict[str, dict[str, list[Write]]]:
    """Returns the writes into objects of other rooms: what is written, by which room. '?' if the type is not known."""
    found = defaultdict[str, dict[str, list[Write]]](lambda: defaultdict(list))
    for write in program.writes:
        owner = program.classes.get(write.owner)
        room = write.place.module.room
        if not write.owner or (owner is not None and owner.module.room != room):
            found[write.what][room].append(write)
    return found


def unowned(program: Effects) -> list[Write]:
    """Returns the writes that the tables do not allow."""
    return [
        write
        for what, rooms in foreign(program).items()
        for room, writes in rooms.items()
        for write in writes
        if room not in (STORES if write.attribute else CALLS).get(what, "").split()
        and (write.attribute or not write.owner or room != "scheduler")
    ]


def test_only_owners_write_state() -> None:
    assert [str(write) for write in unowned(core())] == []


def test_the_tables_name_no_room_that_does_not_write() -> None:
    found = foreign(core())
    stale = {
        f"{what}: {room}"
        for table in (STORES, CALLS)
        for what, rooms in table.items()
        for room in rooms.split()
        if room not in found.get(what, {})
    }
    assert stale == set()


def test_few_calls_are_not_followed() -> None:
    assert {code for one in core().defs for code in one.unfollowed} == UNFOLLOWED


def test_no_query_writes() -> None:
    assert writing_queries(core()) == set()


def writing_queries(program: Effects) -> set[str]:
    return {one.name for one in program.defs if one.writes and _asks(one.node)}


def _asks(function: Function) -> bool:
    """Whether a function says that it only reads: by its name, its docstring, or as a property."""
    says = (ast.get_docstring(function) or "").startswith(("Returns", "Yields", "Whether", "Number"))
    is_property = any(ast.unparse(each) == "property" for each in function.decorator_list)
    return says or is_property or function.name.startswith(("is_", "has_", "num_"))


# Stores on purpose -----------------------------------------------------------------------------------------------

# Path, definition, statements put in, and what a write of which function is found in the end.
PUT_IN = {
    "through a chain": (
        "schedule/planner.py", "plan_step", "lane.rows.known[0] = 1", "plan_step: Rows.known"
    ),
    "in place, by another name": (
        "schedule/results.py", "read_result", "counts = lane.rows.verified\ncounts += 1", "read_result: Rows.verified"
    ),
    "of a loop's variable": (
        "operations/drains.py", "Drains.tick", "for one in self._queue:\n    one.computed = 0",
        "Drains.tick: Request.computed",
    ),
    "of a target among several": (
        "schedule/trials.py", "is_apart", "for lane in proven:\n    number, lane.step = 0, 1", "is_apart: Lane.step"
    ),
    "of another's dictionary": (
        "front_ends.py", "FrontEnds._changed_status", "self._core.counters.resets_by_cause.clear()",
        "FrontEnds._changed_status: Counters.resets_by_cause",
    ),
    "of another that is a dictionary": (
        "operations/operators.py", "Operators._flush", "del self._lanes['w']", "Operators._flush: Lanes.[]"
    ),
    "of what an organ has from the core": (
        "requests/deadlines.py", "Deadlines.tick", "self._frontends.clear()", "Deadlines.tick: Core.frontends"
    ),
    "of an element": (
        "steps.py", "Steps.read", "self._lanes[event.worker].generation += 1", "Steps.read: Lane.generation"
    ),
    "by a method": (
        "waits.py", "Waits.tell", "self._queue.park('')", "Waits.tell: RequestQueue"
    ),
    "by a bound method": (
        "suspicion/convictions.py", "Convictions.tick", "forget = self._lanes.pop\nforget('w')",
        "Convictions.tick: Lanes.[]",
    ),
    "by a lambda": (
        "schedule/placement.py", "backlog", "max([1], key=lambda _: lane.rows.known.fill(0))", "backlog: Rows.known"
    ),
    "by setattr": (
        "suspicion/suspects.py", "Suspects.confirmed", "setattr(lane, 'step', 0)", "Suspects.confirmed: Lane.*"
    ),
    "by del": (
        "requests/listing.py", "Listing.answer", "del self._queue.tenants['']", "Listing.answer: RequestQueue.tenants"
    ),
    "by a function that changes its argument": (
        "schedule/admit.py", "admit", "heapq.heappush(queue.tenants['']._free_turns, 1)",
        "admit: TenantQueue._free_turns",
    ),
    "in a comprehension": (
        "preparations.py", "Preparations.tick", "[one.outputs.clear() for one in self._queue]",
        "Preparations.tick: Request.outputs",
    ),
    "of a message's array": (
        "recovery/workers.py", "ran_out_of_memory", "event.tokens[0] = 1", "ran_out_of_memory: StepDone.tokens"
    ),
    "of what a function passes on": (
        "requests/refusals.py", "_queue_full", "core.queue.by_request_id('')[0].outputs.clear()",
        "_queue_full: Request.outputs",
    ),
    "of what is not known": (
        "requests/refusals.py", "_queue_full", "getattr(core.queue, 'accounts').queues = {}", "_queue_full: ?.queues"
    ),
    "by a method that stores, two calls away": (
        "state/rows.py", "Rows.page_sum", "self._has_logprobs(row)\nself.attach(row, 0, 0)", "_slow_checksum: Rows"
    ),
    "by a property that stores": (
        "state/worker_infos.py", "WorkerInfos.longest_known", "self._departed.clear()", "_length: WorkerInfos"
    ),
    "by a function of the owner's room": (
        "state/lane.py", "holds", "lane.step = 0", "Suspects.begin_on: Lane"
    ),
}  # fmt: skip


@functools.cache
def patched() -> Effects:
    """The core with all of `PUT_IN`."""
    trees = {path: tree(path) for path in files("scheduler_svc/core")}
    for path in trees:
        patches = [patch for patch in PUT_IN.values() if path.as_posix() == f"scheduler_svc/core/{patch[0]}"]
        if patches:
            trees[path] = _patched(trees[path], patches)
    return Effects(trees, CACHES)


def _patched(module: ast.Module, patches: Iterable[tuple[str, str, str, str]]) -> ast.Module:
    module = copy.deepcopy(module)
    for _, definition, code, _ in patches:
        scope: list[ast.stmt] = module.body
        for name in definition.split("."):
            [found] = [one for one in scope if isinstance(one, Function | ast.ClassDef) and one.name == name]
            scope = found.body
        scope[1:1] = ast.parse(code).body
    return module


@pytest.mark.parametrize("case", PUT_IN)
def test_a_store_put_in_on_purpose_is_found(case: str) -> None:
    assert PUT_IN[case][-1] in {f"{write.place.name}: {write.what}" for write in unowned(patched())}


def test_a_query_that_stores_is_found() -> None:
    assert writing_queries(patched()) >= {"Rows.page_sum", "WorkerInfos.longest_known", "holds", "backlog"}
