"""The calls that are no streams, over several cells: which cells get them, and one answer of several. Does no I/O."""

from collections.abc import Iterable, Mapping, Sequence

from grpc_health.v1 import health_pb2
from tandem.v1 import control_pb2

from tandem_client.cells.router import Router
from tandem_client.cells.ways import may_go_elsewhere
from tandem_client.errors import DeadlineExceeded, TandemError

# Their answers are the same in all cells.
OF_ANY_CELL = frozenset({"Tokenize", "Detokenize", "RenderChat", "GetModelInfo"})
ABORT, CHECK, GENERATE, RESUME, WATCH = "Abort", "Check", "Generate", "Resume", "Watch"
# The pause between two looks at the cells' health.
WATCH_SECONDS = 0.2
# The time in which a cell says whether it serves.
CHECK_SECONDS = 3.0


def name_of(method: str) -> str:
    """`Generate` of `/tandem.v1.InferenceService/Generate`."""
    return method.rpartition("/")[2]


def of_one_cell(method: str, addresses: Sequence[str]) -> ValueError:
    """The error for an operator's call, which is about one service."""
    return ValueError(
        f"{name_of(method)} is a call to one service, and this client has {len(addresses)}: make a client of one of "
        f"them, such as {addresses[0]}"
    )


def try_next(error: TandemError) -> bool:
    """Whether another cell may answer a call whose answer is the same in all."""
    return may_go_elsewhere(error)


def serving(answers: Iterable[health_pb2.HealthCheckResponse]) -> health_pb2.HealthCheckResponse | None:
    """Several cells serve if one does; None without an answer."""
    found = list(answers)
    ready = [each for each in found if each.status == health_pb2.HealthCheckResponse.SERVING]
    return next(iter(ready or found), None)


def split_abort(request: control_pb2.AbortRequest, router: Router, num_cells: int) -> Mapping[int, list[str]]:
    """The ids that each cell gets: those that it has, and those of which nobody knows."""
    found: dict[int, list[str]] = {}
    for request_id in request.request_ids:
        known = router.cell_of(request_id)
        for number in range(num_cells) if known is None else (known,):
            found.setdefault(number, []).append(request_id)
    # A request without ids is refused by the service, in its own words.
    return found or {0: []}


def merged_abort(
    request: control_pb2.AbortRequest, answers: Iterable[control_pb2.AbortResponse]
) -> control_pb2.AbortResponse:
    """One result for each id: aborted if a cell has aborted it."""
    outcomes: dict[str, control_pb2.AbortOutcome.ValueType] = {}
    for answer in answers:
        for result in answer.results:
            if outcomes.get(result.request_id) != control_pb2.ABORT_OUTCOME_ABORTED:
                outcomes[result.request_id] = result.outcome
    merged = control_pb2.AbortResponse()
    for request_id in request.request_ids:
        if request_id in outcomes:
            merged.results.add(request_id=request_id, outcome=outcomes[request_id])
    return merged


def are_all_aborted(request: control_pb2.AbortRequest, merged: control_pb2.AbortResponse) -> bool:
    """Whether the cells that did not answer cannot have any of the requests."""
    done = {each.request_id for each in merged.results if each.outcome == control_pb2.ABORT_OUTCOME_ABORTED}
    return done >= set(request.request_ids)


def note_load(router: Router, number: int, load: control_pb2.GetLoadResponse, now: float) -> None:
    """A cell has answered GetLoad."""
    workers = 0 if load.not_serving else load.workers
    router.reported(number, load.running + load.waiting, workers, now)


def note_no_load(router: Router, number: int, error: TandemError, now: float) -> None:
    """A cell has not answered GetLoad; one that forbids it may still serve."""
    if isinstance(error, DeadlineExceeded) or may_go_elsewhere(error):
        router.failed(number, now)
