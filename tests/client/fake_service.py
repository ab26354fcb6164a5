"""A gRPC server of the public API. A test chooses each answer; the server records how each call ended.

It has no model and no tokens: it serves tests of the client, not of the service.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2 as cpb
from tandem.v1 import control_pb2_grpc, inference_pb2_grpc
from tandem.v1 import inference_pb2 as pb

from tests.rigs.waiting import TIMEOUT_SECONDS

WAIT_SECONDS = TIMEOUT_SECONDS
# Of requests without a secret of their own.
SECRET = bytes(32)
Context = grpc.ServicerContext
Messages = Iterator[pb.GenerateResponse]
Behaviour = Callable[[pb.GenerateRequest, "Ending"], Messages]
Resumption = Callable[[pb.ResumeRequest, "Ending"], Messages]
Operation = Callable[[Any, "Ending"], Iterator[Any]]


class Ending:
    """The end of one Generate call as the server sees it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._over = threading.Event()
        if not context.add_callback(self._over.set):
            self._over.set()

    def wait(self, seconds: float = WAIT_SECONDS) -> bool:
        """Waits for the end of the call; returns False if the call is not over in time."""
        return self._over.wait(seconds)


def accepted(request: pb.GenerateRequest | pb.ResumeRequest) -> pb.GenerateResponse:
    is_new = isinstance(request, pb.GenerateRequest)
    num_samples = request.sampling.num_samples if is_new else len(request.offsets)
    sampling = pb.SamplingParams(
        temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, seed=2**63, num_samples=num_samples or 1
    )
    return pb.GenerateResponse(
        accepted=pb.Accepted(
            request_id=request.request_id or "made-up", sampling=sampling, prompt_tokens=3, max_new_tokens=256,
            resume_secret=SECRET,
        )
    )  # fmt: skip


def delta(
    offset: int, ids: list[int], text: str, *, sample_idx: int = 0, logprobs: pb.Logprobs | None = None
) -> pb.GenerateResponse:
    made = pb.Delta(token_offset=offset, token_ids=ids, text=text, sample_idx=sample_idx, logprobs=logprobs)
    return pb.GenerateResponse(delta=made)


def logprobs(*values: float, top_k: int = 0) -> pb.Logprobs:
    """Makes logprobs; the alternatives are tokens 40, 41, … from 0.25 below the token's logprob downwards."""
    top = [(40 + k, value - 0.25 * (k + 1)) for value in values for k in range(top_k)]
    return pb.Logprobs(
        logprobs=values, top_k=top_k, top_token_ids=[t for t, _ in top], top_logprobs=[v for _, v in top]
    )


def prompt_info(start: int, logprobs: pb.Logprobs) -> pb.GenerateResponse:
    return pb.GenerateResponse(prompt_info=pb.PromptInfo(start=start, logprobs=logprobs))


def finished(num_tokens: int, reason: int = pb.FINISH_REASON_LENGTH, *, sample_idx: int = 0) -> pb.GenerateResponse:
    made = pb.Finished(reason=reason, output_tokens=num_tokens, sample_idx=sample_idx)
    return pb.GenerateResponse(finished=made)


def summary(num_tokens: int) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, output_tokens=num_tokens, cached_prompt_tokens=2)
    timing = pb.Timing(total_seconds=0.5, worker_changes=1)
    return pb.GenerateResponse(summary=pb.Summary(usage=usage, timing=timing))


Step = pb.GenerateResponse | Callable[[Ending], object]


def sending(*steps: Step, accepts: bool = True) -> Any:
    """The code of any call: sends Accepted if it accepts, then does each step: sends a message, or calls the rest."""

    def behaviour(request: Any, ending: Ending) -> Messages:
        if accepts:
            yield accepted(request)
        for step in steps:
            if isinstance(step, pb.GenerateResponse):
                yield step
            else:
                step(ending)

    return behaviour


def refusing(code: grpc.StatusCode, message: str, *details: Message) -> Any:
    """The code of any call: fails at once."""
    return sending(fails(code, message, *details), accepts=False)


def refusing_field(field: str, message: str) -> Any:
    """The code of any call: fails at once because of a field."""
    return refusing(grpc.StatusCode.INVALID_ARGUMENT, message, bad_request(field, message))


def fails(code: grpc.StatusCode, message: str, *details: Message) -> Step:
    """A step that ends the call with this status."""
    return lambda ending: fail(ending.context, code, message, *details)


def ends(code: grpc.StatusCode, said: str, **trailing: str | bytes) -> Callable[[Ending], None]:
    """A step that ends the call with a status without the service's details; underscores are hyphens in metadata."""

    def step(ending: Ending) -> None:
        ending.context.set_trailing_metadata(tuple((key.replace("_", "-"), value) for key, value in trailing.items()))
        ending.context.abort(code, said)

    return step


# The connection is lost: a status that does not come from the service.
breaks = ends(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def stays(ending: Ending) -> None:
    """A step that does nothing until the client leaves."""
    # No test waits this long, so no test mistakes the end of this wait for the client's.
    ending.wait(10 * WAIT_SECONDS)


def fail(context: Context, code: grpc.StatusCode, message: str, *details: Message) -> None:
    """Ends the call with a status and google.rpc details, in the form that the API documents."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def bad_request(field: str, description: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return error_details_pb2.BadRequest(field_violations=[violation])


one_completion = sending(delta(0, [5], "Ré"), delta(1, [6, 7], "turn"), finished(3), summary(3))
# Two samples with mixed deltas and logprobs; the second one ends first. The prompt has two pieces.
two_samples = sending(
    prompt_info(1, logprobs(-1.0, -2.0, top_k=1)),
    prompt_info(3, logprobs(-3.0, top_k=1)),
    delta(0, [5], "Ré", logprobs=logprobs(-0.5, top_k=1)),
    delta(0, [8, 9], "en", sample_idx=1, logprobs=logprobs(-1.5, -2.5, top_k=1)),
    finished(2, pb.FINISH_REASON_EOS, sample_idx=1),
    delta(1, [6], "turn", logprobs=logprobs(-0.75, top_k=1)),
    finished(2),
    summary(4),
)
# One token, then nothing until the client leaves.
endless = sending(delta(0, [5], "R"), stays)
not_kept = refusing(grpc.StatusCode.NOT_FOUND, "no request with this id and secret can be resumed")


def waits_first(request: pb.GenerateRequest, ending: Ending) -> Messages:
    """A completion that waits before its first delta and before its second."""
    number = 0
    for message in one_completion(request, ending):
        if message.HasField("delta"):
            number += 1
            waiting = pb.Waiting(reason=pb.WAIT_REASON_WORKER_LOST, message=f"why {number}", since=1e9 + number)
            yield pb.GenerateResponse(waiting=waiting)
        yield message


class _Health(health.HealthServicer):
    """Says why it does not serve, as the service does."""

    words: tuple[tuple[str, str], ...] = ()

    def Check(self, request: Any, context: Any) -> Any:
        context.set_trailing_metadata(self.words)
        return super().Check(request, context)


class FakeService(inference_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.ControlServiceServicer):
    """The server. `behaviour` is the code of Generate; `requests` and `endings` record its calls.

    `resumption` is the code of Resume; `resumed` and `aborted` record the calls of Resume and the ids in Abort.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None, *, address: str = "127.0.0.1:0") -> None:
        """`credentials`: of TLS."""
        self.behaviour: Behaviour = one_completion
        self.requests: list[Message] = []
        self.endings: list[Ending] = []
        self.resumption: Resumption = not_kept
        self.resumed: list[pb.ResumeRequest] = []
        self.aborted: list[str] = []
        # The code of Drain and of UpdateWeights.
        self.operation: Operation = lambda request, ending: iter(())
        # The process ids of the workers in GetLoad's answer.
        self.worker_pids = [77, 78]
        # Those of them that are on standby.
        self.standby_pids: list[int] = []
        # What ListRequests lists, two in a page, and its requests.
        self.listed: list[cpb.RequestEntry] = []
        self.list_queries: list[cpb.ListRequestsRequest] = []
        # GetLoad's answer, if it is not the default one; with a status, the call fails.
        self.load: cpb.GetLoadResponse | grpc.StatusCode | None = None
        self.model = "fake"
        # By Authorization header, "" is for callers with a known certificate; None: everybody has all rights. And the
        # headers for which GetCaller was asked.
        self.rights: dict[str, list[str]] | None = None
        self.asked_for: list[str] = []
        # Why chats are refused.
        self.chat_refusal = ""
        self.health = _Health()
        # Tests shorten the time between the pings of a client.
        options = [("grpc.http2.min_ping_interval_without_data_ms", 1)]
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16), options=options)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        add = self._server.add_insecure_port
        port = add(address) if credentials is None else self._server.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{port}"
        self.serving(True)
        self._server.start()

    def serving(self, yes: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
        self.health.set("", status)

    def stop(self) -> None:
        self._server.stop(None).wait()

    def Generate(self, request: pb.GenerateRequest, context: Context) -> Messages:
        self.requests.append(request)
        ending = Ending(context)
        self.endings.append(ending)
        yield from self.behaviour(request, ending)

    def Resume(self, request: pb.ResumeRequest, context: Context) -> Messages:
        self.resumed.append(request)
        yield from self.resumption(request, Ending(context))

    def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self.requests.append(request)
        return pb.TokenizeResponse(token_ids=request.text.encode())

    def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self.requests.append(request)
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def RenderChat(self, request: pb.RenderChatRequest, context: Context) -> pb.RenderChatResponse:
        self.requests.append(request)
        text = "|".join(message.role for message in request.chat.messages)
        return pb.RenderChatResponse(text=text, token_ids=text.encode())

    def Abort(self, request: cpb.AbortRequest, context: Context) -> cpb.AbortResponse:
        self.aborted += request.request_ids
        outcomes = (cpb.ABORT_OUTCOME_NOT_FOUND, cpb.ABORT_OUTCOME_ABORTED)
        results = [
            cpb.AbortResult(request_id=name, outcome=outcomes[name.startswith("live")]) for name in request.request_ids
        ]
        return cpb.AbortResponse(results=results)

    def ListRequests(self, request: cpb.ListRequestsRequest, context: Context) -> cpb.ListRequestsResponse:
        self.list_queries.append(request)
        first = int(request.page_token or 0)
        end = first + (request.page_size or 2)
        following = str(end) if end < len(self.listed) else ""
        return cpb.ListRequestsResponse(requests=self.listed[first:end], next_page_token=following)

    def GetModelInfo(self, request: cpb.GetModelInfoRequest, context: Context) -> cpb.GetModelInfoResponse:
        return cpb.GetModelInfoResponse(
            model=self.model, vocab_size=256, max_length=1024, eos_token_ids=[0], max_num_samples=16, max_logprobs=20,
            sampling_defaults=pb.SamplingParams(temperature=0.5, repetition_penalty=1.25), window=4096, sink_tokens=4,
            limits=cpb.RequestLimits(max_stop_strings=16, min_priority=-3, max_priority=3),
            chat_refusal=self.chat_refusal,
        )  # fmt: skip

    def GetCaller(self, request: cpb.GetCallerRequest, context: Context) -> cpb.GetCallerResponse:
        given = [str(value) for name, value in context.invocation_metadata() if name == "authorization"]
        self.asked_for += given
        if self.rights is None:
            return cpb.GetCallerResponse(rights=["control", "inference", "metrics"])
        header = given[0] if given else ""
        if header not in self.rights:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not valid")
        return cpb.GetCallerResponse(tenant="acme", rights=self.rights[header])

    def GetLoad(self, request: cpb.GetLoadRequest, context: Context) -> cpb.GetLoadResponse:
        if isinstance(self.load, grpc.StatusCode):
            fail(context, self.load, "the scheduler's core cannot be reached")
        if self.load is not None:
            return self.load
        states = (cpb.WORKER_STATE_SERVING, cpb.WORKER_STATE_STANDBY)
        workers = [
            cpb.WorkerLoad(pid=pid, running=i, pages_total=99, is_standby=waits, state=states[waits])
            for i, pid in enumerate(self.worker_pids)
            for waits in [pid in self.standby_pids]
        ]
        return cpb.GetLoadResponse(
            running=2, steps=2**40, step_ms=1.5, worker_pid=77, prompt_tokens=800, cached_prompt_tokens=200,
            per_worker=workers,
        )  # fmt: skip

    def Drain(self, request: Any, context: Context) -> Iterator[Any]:
        self.requests.append(request)
        ending = Ending(context)
        self.endings.append(ending)
        yield from self.operation(request, ending)

    UpdateWeights = Drain

    def FlushCache(self, request: cpb.FlushCacheRequest, context: Context) -> cpb.FlushCacheResponse:
        self.requests.append(request)
        return cpb.FlushCacheResponse(pages=12)
