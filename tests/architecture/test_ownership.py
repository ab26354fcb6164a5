"""No code of the core changes the state of an object that another class owns.

State lives in the modules of `EXEMPT`, which may store into the objects of each other. Everything else calls
their methods.
"""

import ast

import pytest

from tests.architecture.ownership import foreign_stores
from tests.architecture.source import files, tree

EXEMPT = (
    "scheduler_svc/core/core.py",
    "scheduler_svc/core/state/lane.py",
    "scheduler_svc/core/state/request.py",
    "scheduler_svc/core/state/rows.py",
    "scheduler_svc/core/pages/page_pool.py",
    "scheduler_svc/core/queue/order.py",
    "scheduler_svc/core/queue/request_queue.py",
    "scheduler_svc/core/queue/turns.py",
    "scheduler_svc/core/suspicion/suspects.py",
    "scheduler_svc/core/operations/drains.py",
    "scheduler_svc/core/operations/weights.py",
)


def test_only_state_modules_store_into_state() -> None:
    found = {
        f"{path}:{line}: {code}"
        for path in files("scheduler_svc/core")
        if not str(path).startswith(EXEMPT)
        for line, code in foreign_stores(tree(path))
    }
    assert found == set()


@pytest.mark.parametrize(
    "code",
    [
        "request.computed = 3",
        "request.computed += 1",
        "rows.known[row] += 1",
        "del lane.of[name]",
        "lane.rows.known[row], count = 1, 2",
        "self.lane.step = 3",
        "self._lane.rows.known[0] = 1",
        "request.outputs.append(token)",
        "lane.in_flight[0].ends.fill(0)",
        "self._lane.in_flight.popleft()",
        "setattr(request, 'row', 1)",
        "for request.row in rows:\n        pass",
        "found = lane.rows\n    found.known = 1",
    ],
)
def test_a_store_into_the_state_of_another_object_is_found(code: str) -> None:
    assert foreign_stores(ast.parse(f"def decide(self, lane, rows, request, token, row):\n    {code}\n"))


@pytest.mark.parametrize(
    "code",
    [
        "self.step = 3",
        "self._ends[frontend] = 1",
        "self._ends.setdefault(frontend, []).append(1)",
        "found = []\n    found.append(1)",
        "found = np.zeros(3)\n    found[0] = 1",
        "load = Load()\n    load.backlog = 1",
        "lane.clock.heard(now)",
    ],
)
def test_a_store_into_own_state_or_a_new_local_is_allowed(code: str) -> None:
    assert foreign_stores(ast.parse(f"def decide(self, lane, frontend, now):\n    {code}\n")) == []
