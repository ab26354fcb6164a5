"""Fair shares of rows and of chunks between tenants, if there are several.

**Rows.** Fair share decides which request starts next, but a tenant with long outputs could hold all rows meanwhile. So
if the next request finds no free row, or no pages, and a tenant has at least two rows more than the request's tenant,
that tenant's last request is preempted. It keeps its pages in the cache until they are allocated again, so it usually
computes less than a page again. A row changes hands only if the tenant that gives it still has as many as the one that
takes it, so the numbers of rows approach each other and then rest. Keeping rows free for tenants that may come
would cost throughput all the time.

**Chunks.** Running prompts go before waiting requests, but not those of a tenant that comes later in the order.
"""

from collections import Counter

from scheduler_svc.core.queue.order import running_key
from scheduler_svc.core.schedule.plan_builder import PlanBuilder
from scheduler_svc.core.schedule.trials import Turn
from scheduler_svc.core.state.constrained import holds
from scheduler_svc.core.state.request import Request


def make_room(builder: PlanBuilder, turn: Turn) -> None:
    """Preempts one request if the next one has waited for a row or pages that its tenant has a better claim to."""
    queue, lane = builder.queue, builder.lane
    if not queue.turns.is_shared or turn.is_trial is not None or not turn.admits or turn.closed is lane:
        return
    head = queue.head()
    if head is None or head.pending_plans or not holds(lane, head):
        return
    if lane.num_free_rows and not lane.schedule.still_blocks(head.handle, lane.pool.num_releases):
        return
    running = lane.rows.requests_at(lane.rows.seated())
    rows = Counter(request.tenant for request in running)
    rich = [request for request in running if rows[request.tenant] >= rows[head.tenant] + 2]
    if rich:
        builder.preempt(max(rich, key=running_key))
        builder.row_was_freed()


def before_head(builder: PlanBuilder, turn: Turn, requests: list[Request]) -> tuple[list[Request], list[Request]]:
    """Divides running requests into those that go before the next waiting one and those that go behind it."""
    queue = builder.queue
    head = None if not queue.turns.is_shared or turn.is_trial is not None else queue.head()
    if head is None:
        return requests, []
    at = queue.turns.of(head.tenant).first_turn()
    before = [request for request in requests if request.tenant == head.tenant or request.turn <= at]
    return before, [request for request in requests if request not in before]
