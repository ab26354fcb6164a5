"""Owns whether this front end takes requests, and the reason if it does not. Publishes every change to health at once.

Knows nothing of requests. The front end does not serve until the first model is set. It then serves, also while no
worker is present, because a lost worker does not make a request invalid. It does not serve without the core, while the
core reports that it does not serve, and after draining began. A full queue refuses requests too but leaves health as it
is.
"""

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes.limits import Sizes

SERVICES = (
    "",
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
)
DRAINING = "the service is shutting down and takes no new requests"
NO_WORKER = "no worker has joined yet, so there is no model to serve"
NO_CORE = "the scheduler's core is gone; the front end waits for a new one"


class Readiness:
    """Ready while a model is set, the core serves, and the front end does not drain."""

    def __init__(self, *healths: HealthServicer) -> None:
        self._healths = healths
        self._model: Model | None = None
        self._why_no_model = NO_WORKER
        self._core_status = frontend_pb2.CoreStatus()
        self._is_draining = False
        # The refusal of new requests, if any. Made once, because it may be sent thousands of times a second.
        self._refusal: status.Refusal | None = None
        self._publish()

    @property
    def served(self) -> Model | None:
        """The served model; None without a model."""
        return self._model

    @property
    def sizes(self) -> Sizes:
        """The limits of requests that follow from the served model; without a model no list is allowed."""
        return Sizes() if self._model is None else self._model.sizes

    @property
    def why_not_serving(self) -> str:
        """One sentence; empty while the service serves."""
        if self._is_draining:
            return DRAINING
        if self._model is None:
            return self._why_no_model
        return self._core_status.not_serving

    def set_model(self, model: Model) -> None:
        """Serves this model from now on."""
        self._model = model
        self._publish()

    def set_core_status(self, core_status: frontend_pb2.CoreStatus) -> None:
        """Stores the core's report about its queue and its workers."""
        self._core_status = core_status
        self._publish()

    def lose_core(self) -> None:
        """Forgets the model and the status, because the core is gone."""
        self._why_no_model = NO_CORE
        if self._model is not None and self._model.tokenizer is not None:
            self._model.tokenizer.close()
        self._model = None
        self._core_status = frontend_pb2.CoreStatus()
        self._publish()

    def drain(self) -> None:
        """Takes no more requests, for good."""
        self._is_draining = True
        self._publish()

    def model(self) -> Model:
        """The served model, also while the service drains. Raises Refusal without a model."""
        if self._model is None:
            raise status.not_ready(self._why_no_model)
        return self._model

    def admit(self) -> Model:
        """The served model, for a new request. Raises Refusal if no request is admitted now."""
        if self._refusal is not None:
            # The same exception is raised many times, so the traceback of the last time is removed.
            raise self._refusal.with_traceback(None)
        return self.model()

    def _publish(self) -> None:
        why, full = self.why_not_serving, self._core_status.queue_full
        seconds = self._core_status.retry_seconds or status.QUEUE_FULL_RETRY_SECONDS
        self._refusal = status.not_ready(why) if why else status.overloaded(full, seconds) if full else None
        for health in self._healths:
            health.set(is_serving=not why)
