"""Owns whether this front end takes requests and whether they are computed, the reason if not, and the health of it.

Knows nothing of requests. The core says whether it computes a request that arrives (`core/status.py`);
`Readiness` adds what the core cannot know: that it is gone, that this front end drains, or still loads the model.
Health is that value. A request is refused without a model or the core, while the core says so, and after draining
began; otherwise it may wait for a worker. A full queue refuses requests too but leaves health as it is.

When the queue is no longer full, the core says how many requests it takes. As many are let in; those beyond are refused
at once, and not when the core has heard of the first ones, because calls arrive faster than requests are read. Those
that are on their way when the core says a number again count too: the core does not know of them. A front end does not
see when a place becomes free, so it believes the number for a tenth of a second and while a request is on its way, or
until the core says something else.

All services of a front end have the same health. An unknown service name is answered and not stored.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.entrance import caller
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.calls import MAX_SMALL_BYTES
from scheduler_svc.frontend.rpc.gate import Bound, Gate, Places
from scheduler_svc.frontend.sizes import NO_MODEL, Check, Sizes
from scheduler_svc.frontend.watching import Watch

BELIEVED_SECONDS = 0.1
MAX_WATCHES = 1000
# The most health watches of one connection.
MAX_OWN_WATCHES = 100

State = pb.HealthCheckResponse
# Trailing metadata of a Check that answers NOT_SERVING: a word for the reason, and Unix time. Everyone may read them.
REASON_KEY, SINCE_KEY = "tandem-reason", "tandem-since"
# The answer to an unknown name has the name.
_check = Check(pb.HealthCheckRequest)


class HealthServicer(health_pb2_grpc.HealthServicer):
    """NOT_SERVING until `set` changes it."""

    def __init__(self, max_watches: int | None = None) -> None:
        self._max_watches = MAX_WATCHES if max_watches is None else max_watches
        self._state = State.NOT_SERVING
        self._metadata: tuple[tuple[str, str], ...] = ()
        # In order of arrival.
        self.watches: dict[Watch, None] = {}
        bound = Bound(per_key=MAX_OWN_WATCHES, thing="health watch of this connection", state="are open")
        self._of_connection = Places(bound)

    def set(self, *, reason: str, since: float) -> None:
        """Stores the state: SERVING if `reason`, a word, is empty. Every later answer has it. `since`: Unix time."""
        self._state = State.NOT_SERVING if reason else State.SERVING
        self._metadata = ((REASON_KEY, reason), (SINCE_KEY, f"{since:.3f}")) if reason else ()
        for watch in self.watches:
            watch.changed.set()

    def admit_watch(self) -> int:
        """The size limit of a Watch request in bytes. Raises Refusal if too many watches are open."""
        if len(self.watches) >= self._max_watches:
            raise status.overloaded(f"{len(self.watches)} health watches are open; the limit is {self._max_watches}")
        return MAX_SMALL_BYTES

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """Returns the health of one service. NOT_FOUND if the name is unknown."""
        _check(request)
        if request.service not in SERVICES:
            message = f"service {request.service[:128]!r} is not known here"
            raise status.Refusal(grpc.StatusCode.NOT_FOUND, message)
        if self._metadata:
            context.set_trailing_metadata(self._metadata)
        return pb.HealthCheckResponse(status=self._state)

    async def List(self, request: Any, context: Any) -> Any:
        # The types of grpcio-health-checking lack this message.
        return cast(Any, pb).HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._state) for name in SERVICES}
        )

    # A coroutine that writes, like every streaming method of the front end.
    async def Watch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.HealthCheckRequest, context: Any
    ) -> None:
        """Sends the health of one service now and after each change; SERVICE_UNKNOWN if the name is unknown."""
        _check(request)
        is_known = request.service in SERVICES
        request.Clear()
        # Several calls may have been admitted while they waited for their messages.
        self.admit_watch()
        with self._of_connection.taking(context.peer()):
            watch, sent = Watch(caller=caller()), None
            self.watches[watch] = None
            try:
                while True:
                    state = self._state if is_known else State.SERVICE_UNKNOWN
                    if state != sent:
                        sent = state
                        await watch.write(context, pb.HealthCheckResponse(status=state))
                    await watch.wait()
            finally:
                del self.watches[watch]


# The known names of services; the empty one stands for all.
SERVICES = (
    "",
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
)
_NAMES = {number: name.removeprefix("WAIT_REASON_").lower() for name, number in inference_pb2.WaitReason.items()}


@dataclass(frozen=True, slots=True)
class NotServing:
    """Why a request that arrives now is not computed: a word, one sentence, and the number of the API or 0."""

    name: str
    message: str
    reason: inference_pb2.WaitReason.ValueType = inference_pb2.WAIT_REASON_UNSPECIFIED


DRAINING = NotServing(
    "shutting_down",
    "the service is shutting down and takes no new requests",
    inference_pb2.WAIT_REASON_SHUTTING_DOWN,
)
NO_WORKER = NotServing(
    "no_worker", "no worker has joined yet, so there is no model to serve", inference_pb2.WAIT_REASON_NO_WORKER
)
NO_CORE = NotServing("scheduler_lost", "the scheduler's core is gone; the front end waits for a new one")
LOADING_MODEL = NotServing("loading_model", "the front end loads the model's tokenizer")


class Readiness:
    """Ready while a model is set, the core computes, and the front end does not drain."""

    def __init__(self, *healths: HealthServicer) -> None:
        self._healths = healths
        self.served: Model | None = None
        """The served model; None without a model."""
        self._why_no_model = NO_WORKER
        self._core_status = frontend_pb2.CoreStatus()
        self._is_draining = False
        self.not_serving: NotServing | None = NO_WORKER
        """Why a request that arrives now is not computed; None while it is."""
        self.since = time.time()
        """Unix time [s] since when that is so, for any reason."""
        # Closed while no new request is admitted, or none of a tenant. It bounds nothing.
        self.requests = Gate()
        self.on_their_way: set[object] = set()
        """The tasks of the new requests that were let in and that the core has not answered."""
        # The places in the queue for requests that are let in now, and until when on this clock; None: not counted.
        self._places: Places | None = None
        self._places_until = 0.0
        # When a refused request may be sent again, as the core said when its queue was full last.
        self._retry_seconds = status.QUEUE_FULL_RETRY_SECONDS
        self._publish()

    @property
    def sizes(self) -> Sizes:
        """The limits of requests that follow from the served model; without a model no list is allowed."""
        return NO_MODEL if self.served is None else self.served.sizes

    def set_model(self, model: Model) -> None:
        self.served = model
        self._publish()

    def set_core_status(self, core_status: frontend_pb2.CoreStatus) -> None:
        self._core_status, self._places = core_status, None
        self._retry_seconds = core_status.retry_seconds or self._retry_seconds
        if core_status.places:
            bound = Bound(
                most=core_status.places,
                is_shared=False,
                thing="request",
                state="are on their way to the queue",
                retry_seconds=self._retry_seconds,
            )
            self._places, self._places_until = Places(bound), time.monotonic() + BELIEVED_SECONDS
            # The core does not know of them yet.
            self._places.add("", len(self.on_their_way))
        if not core_status.not_serving:
            self._why_no_model = LOADING_MODEL
        self._publish()

    def lose_core(self) -> None:
        """Forgets the model and the status, because the core is gone."""
        self._why_no_model = NO_CORE
        if self.served is not None and self.served.tokenizer is not None:
            self.served.tokenizer.threads.close()
        self.served = None
        self._core_status = frontend_pb2.CoreStatus()
        self._places = None
        self._publish()

    def drain(self) -> None:
        """Takes no more requests, for good."""
        self._is_draining = True
        self._publish()

    def model(self) -> Model:
        """The served model, also while the service drains. Raises Refusal without a model."""
        if self.served is None:
            raise status.not_ready((self._of_core() or self._why_no_model).message)
        return self.served

    def admit(self) -> Model:
        """The served model, for a new request of the caller. Raises Refusal if none is admitted now."""
        self.requests.check(caller().tenant)
        return self.model()

    @property
    def refuses_most(self) -> bool:
        """Whether new requests are refused, or counted: the queue is full, or was a moment ago."""
        return self._places is not None or bool(self._core_status.queue_full)

    def let_in(self) -> None:
        """Counts a new request, before its message is read. Raises Refusal if the queue has no place for it."""
        if self._places is not None:
            if self.on_their_way or time.monotonic() < self._places_until:
                self._places.take("")
            else:
                self._places = None
        if (task := asyncio.current_task()) is not None:
            self.on_their_way.add(task)
            task.add_done_callback(self.on_their_way.discard)

    def _of_core(self) -> NotServing | None:
        """What the core says; None if it computes."""
        sent = self._core_status
        if not sent.not_serving:
            return None
        return NotServing(_NAMES.get(sent.reason, "unknown"), sent.not_serving, sent.reason)

    def _publish(self) -> None:
        full = self._core_status.queue_full
        why = DRAINING if self._is_draining else self._of_core() or (None if self.served else self._why_no_model)
        if why is not None:
            is_of_core = why.message == self._core_status.not_serving
            began = time.time() - (self._core_status.not_serving_seconds if is_of_core else 0.0)
            self.since = began if self.not_serving is None else min(began, self.since)
        self.not_serving = why
        seconds = self._core_status.retry_seconds or status.QUEUE_FULL_RETRY_SECONDS
        refuses = self._is_draining or self.served is None or self._core_status.refuses
        if why is not None and refuses:
            self.requests.close(status.not_ready(why.message))
        elif full:
            self.requests.close(status.overloaded(full, seconds))
        else:
            self.requests.open()
        for health in self._healths:
            health.set(reason="" if why is None else why.name, since=self.since)
