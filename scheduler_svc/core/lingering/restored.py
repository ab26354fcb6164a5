"""Takes up requests of an earlier process, as its journal has them. Decides nothing about other requests."""

from collections.abc import Sequence

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.update.endings import Ending, ending_of


def restore_output(request: Request, tokens: Int32Array) -> None:
    """Gives a new request the output that it had in an earlier process."""
    request.restore(tokens)
    if len(tokens):
        request.emitted_first_token(request.arrived_at)
        request.emitted_last_token(request.arrived_at)


def restored_ending(request: Request, infos: Sequence[WorkerInfo], identity: str) -> Ending | None:
    """Returns the ending of a restored request that its tokens have ended already, or that the model cannot hold.

    `infos` are the known workers, which serve the same model, `identity` is the model of the request.
    """
    if identity not in ("", infos[0].identity):
        return Ending.failed(request, f"request {request.request_id}: another model is served after the restart")
    if request.known > request.total_length or int(request.prompt.max()) >= infos[0].vocab_size:
        what = f"its {request.known} tokens do not fit the model that is served after the restart"
        return Ending.failed(request, f"request {request.request_id}: {what}")
    if not request.num_outputs:
        return None
    token = int(request.tokens_between(request.known - 1, request.known)[0])
    is_eos = not request.ignore_eos and token in infos[0].eos_token_ids
    return ending_of(request, token, request.known, is_eos)
