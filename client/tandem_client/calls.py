"""The calls that both clients have, but those that stream a completion: a method, a request, the meaning of an answer.

A function here has the signature and the docstring of a client's method; `method_of` makes that method of it, in a way
that each client has. Knows nothing of channels and retries, which the clients own.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tandem_client import types
from tandem_client.connection import Metadata
from tandem_client.wire import messages
from tandem_client.wire.parts import ChatMessages, ChatOptions, chat_prompt, fill, number_of
from tandem_client.wire.request import to_service

_Value = TypeVar("_Value")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Running = Literal["finish", "recompute", "continue", "abort"]
_Unary = grpc.UnaryUnaryMultiCallable
_Streaming = grpc.UnaryStreamMultiCallable


class Stubs:
    def __init__(self, channel: grpc.Channel) -> None:
        self.channel: Any = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control = control_pb2_grpc.ControlServiceStub(channel)
        # This stub has no types.
        self.health = cast(Any, health_pb2_grpc.HealthStub(channel))


class Rpc(Generic[_Value]):
    """One call. `method` finds it among a client's stubs, `read` makes the value of its answer. `timeout`: seconds."""

    def __init__(
        self,
        method: "Callable[[Stubs], _Unary[_Request, _Response] | _Streaming[_Request, _Response]]",
        request: _Request,
        timeout: float | None,
        read: Callable[[_Response], _Value],
        more: Metadata = (),
    ) -> None:
        self.method: Callable[[Stubs], Any] = method
        self.request: Any = request
        self.read: Callable[[Any], _Value] = read
        self.timeout, self.more = timeout, more


def tokenize(
    text: str, *, add_special_tokens: bool | None = None, model: str | None = None, timeout: float | None = None
) -> Rpc[list[int]]:
    """The token ids that `generate` would make of the text. `timeout`: seconds."""
    request = fill(inference_pb2.TokenizeRequest(), text=text, add_special_tokens=add_special_tokens, model=model)
    return Rpc(lambda stubs: stubs.inference.Tokenize, request, timeout, lambda answer: list(answer.token_ids))


def detokenize(
    token_ids: Iterable[int],
    *,
    skip_special_tokens: bool | None = None,
    model: str | None = None,
    timeout: float | None = None,
) -> Rpc[str]:
    """The text of token ids. `timeout`: seconds."""
    request = inference_pb2.DetokenizeRequest()
    fill(request, model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    return Rpc(lambda stubs: stubs.inference.Detokenize, request, timeout, lambda answer: answer.text)


def render_chat(
    chat: ChatMessages, *, model: str | None = None, timeout: float | None = None, **options: Unpack[ChatOptions]
) -> Rpc[types.RenderedChat]:
    """The text and the token ids that `generate` would make of a conversation (`ChatOptions`). `timeout`: seconds."""
    request = fill(inference_pb2.RenderChatRequest(chat=chat_prompt(chat, **options)), model=model)
    return Rpc(lambda stubs: stubs.inference.RenderChat, request, timeout, messages.rendered_chat)


def abort(*request_ids: str, service: str | None = None, timeout: float | None = None) -> Rpc[types.AbortOutcomes]:
    """Cancels waiting or running requests of this client's tenant; the outcome for each id. `timeout`: seconds.

    An id may be that of an HTTP answer, too (`cmpl-…`, `chatcmpl-…`). With the right of control, `tenant/id` is another
    tenant's request. The result's `details` name what was looked for, by the ids that were not found.
    `service` is that of their streams, by which a proxy in front of several finds it.
    """
    request = fill(control_pb2.AbortRequest(), request_ids=request_ids)
    return Rpc(lambda stubs: stubs.control.Abort, request, timeout, messages.abort_outcomes, to_service(service))


def list_requests(
    *,
    tenant: str = "",
    states: Iterable[types.RequestState | str] = (),
    id_prefix: str = "",
    page_size: int = 0,
    page_token: str = "",
    timeout: float | None = None,
) -> Rpc[types.RequestPage]:
    """A page of the requests that wait or run, and of the answers that are kept, those accepted first before others.

    Without the right of control only this client's tenant has requests here. `states`: waiting, running, kept; none:
    all. `id_prefix`: the beginning of an id. `page_size`: at most 100; 0: 100. `page_token`: `next_page_token` of the
    page before. InvalidArgument: the token is from before the service's last start. `timeout`: seconds.
    """
    request = control_pb2.ListRequestsRequest(
        tenant=tenant,
        states=[cast(Any, number_of("a state", state, control_pb2.RequestState.DESCRIPTOR)) for state in states],
        id_prefix=id_prefix,
        page_size=page_size,
        page_token=page_token,
    )
    return Rpc(lambda stubs: stubs.control.ListRequests, request, timeout, messages.request_page)


def model_info(*, timeout: float | None = None) -> Rpc[types.ModelInfo]:
    """The served model, its limits and default settings. `timeout`: seconds."""
    request = control_pb2.GetModelInfoRequest()
    return Rpc(lambda stubs: stubs.control.GetModelInfo, request, timeout, messages.model_info)


def load(*, timeout: float | None = None) -> Rpc[types.Load]:
    """The service's load: requests, pages, workers; and whether it serves. `timeout`: seconds."""
    return Rpc(lambda stubs: stubs.control.GetLoad, control_pb2.GetLoadRequest(), timeout, messages.load)


def health(*, timeout: float | None = None) -> Rpc[bool]:
    """Whether the service is ready. Raises Unavailable if it cannot be reached. `timeout`: seconds."""

    def read(answer: health_pb2.HealthCheckResponse) -> bool:
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    return Rpc(lambda stubs: stubs.health.Check, health_pb2.HealthCheckRequest(), timeout, read)


def flush_cache(*, timeout: float | None = None) -> Rpc[int]:
    """Empties the prefix cache; the number of pages that it held. `timeout`: seconds."""
    request = control_pb2.FlushCacheRequest()
    return Rpc(lambda stubs: stubs.control.FlushCache, request, timeout, lambda answer: answer.pages)


def quarantine(*, timeout: float | None = None) -> Rpc[list[types.QuarantinedRequest]]:
    """The requests that the service refuses because they killed workers, oldest first. `timeout`: seconds."""
    request = control_pb2.ListQuarantineRequest()

    def read(answer: control_pb2.ListQuarantineResponse) -> list[types.QuarantinedRequest]:
        return [messages.value(types.QuarantinedRequest, request) for request in answer.requests]

    return Rpc(lambda stubs: stubs.control.ListQuarantine, request, timeout, read)


def clear_quarantine(*keys: str, timeout: float | None = None) -> Rpc[int]:
    """Ends the quarantine of requests with these keys, of all without keys; their number. `timeout`: seconds."""
    request = control_pb2.ClearQuarantineRequest(keys=keys)
    return Rpc(lambda stubs: stubs.control.ClearQuarantine, request, timeout, lambda answer: answer.removed)


def drain(
    worker: str = "", *, max_seconds: float = 0.0, force: bool = False, timeout: float | None = None
) -> Rpc[types.DrainProgress]:
    """Empties a worker, or the service without a name, and ends it; yields the progress about once a second.

    `worker`: its `name` or `pid` in `load().per_worker`. `max_seconds`: the time for the drain; 0: no limit for a
    worker, `grace_seconds` for the service. `force`: also the last worker that serves. The drain goes on if the
    iteration is left early; the same call watches it again. NotFound: no worker has this name; InvalidArgument: it is
    the last one.
    """
    request = control_pb2.DrainRequest(worker=worker, max_seconds=max_seconds, force=force)
    return Rpc(lambda stubs: stubs.control.Drain, request, timeout, messages.drain_progress)


def update_weights(
    folder: str | os.PathLike[str],
    *,
    version: str,
    running: Running = "recompute",
    in_turn: bool = False,
    max_seconds: float = 0.0,
    timeout: float | None = None,
) -> Rpc[types.UpdateProgress]:
    """Lets all workers load new weights of the same model; yields the progress about once a second.

    The last value has a final state; only DONE means that all workers have the weights. `folder`: an absolute path
    on the workers' hosts, below the service's --weights-folders, with safetensors. `version`: a name that was never
    used before. `running`: requests on a worker that loads finish first, are computed again, continue with the old
    keys and values, or are aborted. `in_turn`: one worker after the other. `max_seconds`: the time for the update;
    0: 600. The update goes on if the iteration is left early; the same call watches it again. PermissionDenied:
    updates are off; AlreadyExists: another one goes on; InvalidArgument: a wrong folder or version.
    """
    request = control_pb2.UpdateWeightsRequest(
        version=version,
        folder=os.fspath(folder),
        running=cast(Any, number_of("running", running, control_pb2.RunningRequests.DESCRIPTOR)),
        in_turn=in_turn,
        max_seconds=max_seconds,
    )
    return Rpc(lambda stubs: stubs.control.UpdateWeights, request, timeout, messages.update_progress)


def method_of(
    make: Callable[..., Rpc[Any]],
    run: Callable[[Any, Rpc[Any]], Any],
    several: Any = None,
    item: Any = None,
    *,
    is_coroutine: bool = False,
) -> Any:
    """The method that makes a call and runs it with its client; as a coroutine function if `run` has a coroutine.

    `help` prints the signature of `make` with `self`. `several`: an iterator of values, or if `item` is given of these.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, make(*args, **kwargs))

    # What calls a client looks whether its method is a coroutine function.
    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await run(self, make(*args, **kwargs))

    made: Any = functools.update_wrapper(coroutine if is_coroutine else method, make)
    signature, me = inspect.signature(make), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    (value,) = signature.return_annotation.__args__
    shown = value if several is None else several[item or value]
    made.__signature__ = signature.replace(parameters=[me, *signature.parameters.values()], return_annotation=shown)
    return made
