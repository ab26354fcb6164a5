"""Mutations of how the core handles constraints, and the test that detects each. Owns the list."""

from tests.mutations.edits import Edit, argument, assigned, call, condition, drop, replace, returned
from tests.mutations.mutation import Mutation

_TESTS = "tests/scheduler_svc/core/test_constraints.py"


def _of(name: str, breaks: str, module: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(
        name=name, breaks=breaks, module=f"scheduler_svc.core.{module}", edits=edits, test=f"{_TESTS}::{test}"
    )


CONSTRAINTS: tuple[Mutation, ...] = (
    _of(
        "a-row-samples-before-its-constraint-is-ready",
        "a row is planned as if its worker had prepared its constraint",
        "state.constrained",
        "test_a_long_prompt_is_computed_while_its_constraint_is_prepared",
        drop("began", call("await_constraint")),
    ),
    _of(
        "a-constraint-is-ready-after-a-reset",
        "after a reset the worker is not sent its constraints again",
        "state.lane",
        "test_after_a_reset_a_constraint_is_sent_again_before_its_rows_sample",
        drop("Lane.reset", call("constraints.reset")),
    ),
    _of(
        "a-constraint-is-dropped-while-a-plan-names-it",
        "a worker drops a constraint that a plan in flight still names",
        "preparations",
        "test_a_constraint_is_dropped_with_its_last_request_and_not_before_its_last_plan",
        replace("Preparations.drops", argument("take_drops", 0), "lane.step"),
    ),
    _of(
        "a-constraint-is-dropped-while-it-is-used-again",
        "a constraint is dropped although another request has brought it",
        "preparations",
        "test_a_constraint_that_another_request_brings_in_time_is_not_dropped",
        drop("Preparations.accepted", call("constraints.used")),
    ),
    _of(
        "a-refused-constraint-ends-others",
        "a constraint that cannot be prepared ends requests with other constraints",
        "preparations",
        "test_a_constraint_that_cannot_be_prepared_ends_its_requests_alone",
        replace("Preparations._fail", condition("constraint"), "request.worker in ('', lane.worker)"),
    ),
    _of(
        "no-limit-of-all-sources",
        "constraints of live requests may take any amount of memory",
        "constraints.sources",
        "test_all_sources_together_have_a_limit",
        replace("Sources.refusal", assigned("free"), "1 << 60"),
    ),
    _of(
        "a-tenant-fills-the-room-of-constraints",
        "one tenant's constraints leave no room for others",
        "constraints.sources",
        "test_a_tenant_leaves_room_for_the_constraints_of_others",
        replace("Sources.refusal", condition("_bytes_of"), "False"),
    ),
    _of(
        "a-completed-output-goes-on",
        "an output whose constraint is complete goes on",
        "update.endings",
        "test_a_constraint_is_sent_once_and_its_output_ends_where_it_is_complete",
        replace("ending_of", condition("is_complete"), "False"),
    ),
    _of(
        "a-worker-without-constraints-gets-one",
        "a constrained request starts on a worker that takes no constraints",
        "state.constrained",
        "test_workers_that_take_no_constraints_get_none",
        replace("holds", returned, "info.holds(request.total_length)"),
    ),
    _of(
        "an-answer-may-never-come",
        "requests wait for ever for a worker that never answers",
        "steps",
        "test_an_answer_that_never_comes_ends_its_requests_alone",
        drop("Steps.plan", call("preparations.expire")),
    ),
)
