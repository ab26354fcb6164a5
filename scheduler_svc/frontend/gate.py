"""Owns whether this front end takes requests: the served model, once there is one, and draining. Tells it to health.

Knows nothing of requests. NOT_SERVING until the first model, SERVING from then on: a lost worker turns nobody away.
A lost core or a drain is NOT_SERVING at once.
"""

import asyncio

from grpc_health.v1 import health, health_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend import status
from scheduler_svc.frontend.model import Model

SERVICES = (
    "",
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
)


class Gate:
    """Open while a model is served and nobody drains."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self._health = servicer
        self._model: Model | None = None
        self._why_shut = "no worker has joined yet; there is no model to serve"
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def open(self, model: Model) -> None:
        self._model = model
        self._publish()

    def shut(self) -> None:
        """The core is gone; what it serves is not known any more."""
        self._why_shut = "the scheduler's core is gone; another is waited for"
        if self._model is not None and self._model.text is not None:
            self._model.text.close()
        self._model = None
        self._publish()

    def drain(self) -> None:
        """For good."""
        self._draining = True
        self._publish()

    def model(self) -> Model:
        """The served model, draining or not. Raises Refusal."""
        if self._model is None:
            raise status.not_ready(self._why_shut)
        return self._model

    def admit(self) -> Model:
        """The served model, for a new request. Raises Refusal."""
        if self._draining:
            raise status.not_ready("the service is shutting down and takes no new requests")
        return self.model()

    def _publish(self) -> None:
        # A watcher that reads nothing blocks the servicer's own lock, so nobody waits for this.
        task = asyncio.get_running_loop().create_task(self.publish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def publish(self) -> None:
        """Sets health to what the gate is now."""
        is_open = self._model is not None and not self._draining
        state = health_pb2.HealthCheckResponse.SERVING if is_open else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in SERVICES:
            await self._health.set(service, state)
