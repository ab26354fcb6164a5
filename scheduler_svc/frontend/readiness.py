"""Owns whether this front end takes requests and whether they are computed, and the reason if not.

Knows nothing of requests. The core says whether it computes a request that arrives (`core/status.py`); this
module adds what the core cannot know: that it is gone, that this front end drains, or still loads the model. Health is
that value. A request is refused without a model or the core, while the core says so, and after draining began;
otherwise it may wait for a worker. A full queue refuses requests too but leaves health as it is.
"""

import time
from dataclasses import dataclass

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import Sizes

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
        self._model: Model | None = None
        self._why_no_model = NO_WORKER
        self._core_status = frontend_pb2.CoreStatus()
        self._is_draining = False
        self.not_serving: NotServing | None = NO_WORKER
        """Why a request that arrives now is not computed; None while it is."""
        self.since = time.time()
        """Since when that is so, whatever the reasons were: Unix time."""
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

    def set_model(self, model: Model) -> None:
        """Serves this model from now on."""
        self._model = model
        self._publish()

    def set_core_status(self, core_status: frontend_pb2.CoreStatus) -> None:
        """Stores the core's report about its queue and its workers."""
        self._core_status = core_status
        if not core_status.not_serving:
            self._why_no_model = LOADING_MODEL
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
            raise status.not_ready((self._of_core() or self._why_no_model).message)
        return self._model

    def admit(self) -> Model:
        """The served model, for a new request. Raises Refusal if no request is admitted now."""
        if self._refusal is not None:
            # The same exception is raised many times, so the traceback of the last time is removed.
            raise self._refusal.with_traceback(None)
        return self.model()

    def _of_core(self) -> NotServing | None:
        """What the core says; None if it computes."""
        sent = self._core_status
        if not sent.not_serving:
            return None
        return NotServing(_NAMES.get(sent.reason, "unknown"), sent.not_serving, sent.reason)

    def _why(self) -> NotServing | None:
        if self._is_draining:
            return DRAINING
        return self._of_core() or (None if self._model is not None else self._why_no_model)

    def _publish(self) -> None:
        why, full = self._why(), self._core_status.queue_full
        if why is not None:
            is_of_core = why.message == self._core_status.not_serving
            began = time.time() - (self._core_status.not_serving_seconds if is_of_core else 0.0)
            self.since = began if self.not_serving is None else min(began, self.since)
        self.not_serving = why
        seconds = self._core_status.retry_seconds or status.QUEUE_FULL_RETRY_SECONDS
        refuses = self._is_draining or self._model is None or self._core_status.refuses
        if why is not None and refuses:
            self._refusal = status.not_ready(why.message)
        else:
            self._refusal = status.overloaded(full, seconds) if full else None
        for health in self._healths:
            health.set(reason="" if why is None else why.name, since=self.since)
