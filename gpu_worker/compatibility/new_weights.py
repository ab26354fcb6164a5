"""Carries out an order to load new weights: checks, copies in place, and repeats the self-check.

Before the first byte is written an error refuses the order, and nothing has changed. After it an error ends the worker.
Knows nothing of sockets.
"""

import logging
import time

import torch
from tandem.internal.v1 import worker_pb2 as pb
from transformers import PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelFiles, ModelRefused
from gpu_worker.checkpoint.replace import check_targets, read_weights, replace_weights, resolve_folder
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.failures import first_line
from gpu_worker.step.runner import Runner

log = logging.getLogger(__name__)


class WeightsLoader:
    """Loads weights into one served model."""

    def __init__(
        self, model: PreTrainedModel, files: ModelFiles, runner: Runner, *, dtype: torch.dtype, layers: LayerMap
    ) -> None:
        """files: those that the worker started with. layers: as the model has them (`check_runner`)."""
        self._model, self._files, self._runner = model, files, runner
        self._dtype, self._layers = dtype, layers

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        """Loads, and returns the answer. Raises an error of the machine or ModelRefused after a byte was written."""
        begun = time.perf_counter()
        try:
            folder = resolve_folder(order.folder, order.roots)
            weights = read_weights(folder, self._files, self._dtype)
            check_targets(self._model, weights)
        except (ModelRefused, OSError, MemoryError, RuntimeError) as error:
            log.warning("weights %r are refused: %s", order.version, first_line(error))
            return pb.WeightsLoaded(version=order.version, ok=False, detail=first_line(error))
        checked = time.perf_counter()
        replace_weights(self._model, weights)
        self._synchronize()
        copied = time.perf_counter()
        self._runner.labels.forget()
        if not order.keep_rows:
            # It uses rows and pages of its own, so it is left out where they must stay.
            check_runner(self._model, self._runner, self._dtype, own=self._layers)
        log.info(
            "weights %r from %s: checked in %.3f s, copied in %.3f s, self-check in %.3f s",
            *(order.version, folder, checked - begun, copied - checked, time.perf_counter() - copied),
        )
        return pb.WeightsLoaded(version=order.version, ok=True)

    def _synchronize(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
