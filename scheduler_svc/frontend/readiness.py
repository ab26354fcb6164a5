"""Owns whether this front end takes requests, and why not. Publishes it to health, before it returns.

Knows nothing of requests. Not serving until the first model; serving from then on, also while no worker is present: a
lost worker turns nobody away. Without the core, while the core does not serve, or once draining, it does not serve. A
full queue refuses requests too, and leaves health as it is.
"""

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status

SERVICES = (
    "",
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
)
DRAINING = "the service is shutting down and takes no new requests"
NO_WORKER = "no worker has joined yet; there is no model to serve"
NO_CORE = "the scheduler's core is gone; another is waited for"


class Readiness:
    """Open while a model is served, the core serves, and nothing drains."""

    def __init__(self, health: HealthServicer) -> None:
        self._health = health
        self._model: Model | None = None
        self._why_no_model = NO_WORKER
        self._core_status = frontend_pb2.CoreStatus()
        self._is_draining = False
        # What a new request is refused with now; made once, since it may be sent thousands of times a second.
        self._refusal: status.Refusal | None = None
        self._publish()

    @property
    def served(self) -> Model | None:
        """The served model, None while there is none."""
        return self._model

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
        """What the core says of its queue and of itself."""
        self._core_status = core_status
        self._publish()

    def lose_core(self) -> None:
        """The core is gone; what it serves is not known any more."""
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
        """The served model, also while the service drains. Raises Refusal."""
        if self._model is None:
            raise status.not_ready(self._why_no_model)
        return self._model

    def admit(self) -> Model:
        """The served model, for a new request. Raises Refusal."""
        if self._refusal is not None:
            # Raised again and again, so what the last time left on it goes first.
            raise self._refusal.with_traceback(None)
        return self.model()

    def _publish(self) -> None:
        why, full = self.why_not_serving, self._core_status.queue_full
        self._refusal = status.not_ready(why) if why else status.overloaded(full) if full else None
        self._health.set(is_serving=not why)
