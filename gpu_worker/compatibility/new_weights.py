"""Carries out an order to load new weights: checks, copies in place, and repeats the self-check.

Before the first byte is written an error refuses the order, and nothing has changed. After it an error ends the worker.
Knows nothing of sockets.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from tandem.internal.v1 import worker_pb2 as pb
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelFiles
from gpu_worker.checkpoint.replace import NewWeights, check_targets, read_weights, replace_weights
from gpu_worker.checkpoint.same_model import check_described, read_described
from gpu_worker.checkpoint.weights import opened_weights
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.failures import first_line
from gpu_worker.process.ranks import SINGLE, Ranks
from gpu_worker.step.runner import Runner

log = logging.getLogger(__name__)


class WeightsLoader:
    """Loads weights into one served model, or into a rank's part of it."""

    def __init__(
        self,
        model: PreTrainedModel,
        files: ModelFiles,
        runner: Runner,
        *,
        dtype: torch.dtype,
        layers: LayerMap,
        check_config: Callable[[PreTrainedConfig], None],
        ranks: Ranks = SINGLE,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """files: those that the worker started with. layers: as the model has them (`check_runner`).

        check_config: raises ModelRefused for a config that computes something else than the model's.
        agree: whether all ranks of a group say yes; each calls it once per order.
        """
        self._model, self._files, self._runner = model, files, runner
        self._dtype, self._layers = dtype, layers
        self._ranks, self._agree, self._check_config = ranks, agree, check_config

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        """Loads, and returns the answer. Raises an error of the machine or ModelRefused after a byte was written."""
        with ExitStack() as opened:
            return self._load(order, opened)

    def _load(self, order: pb.LoadWeights, opened: ExitStack) -> pb.WeightsLoaded:
        begun = time.perf_counter()
        weights, refusal = self._checked(order, opened)
        if not self._agree(weights is not None):
            detail = refusal or "another rank of the group refuses them, as its log shows"
            log.warning("weights %r are refused: %s", order.version, detail)
            return pb.WeightsLoaded(version=order.version, ok=False, detail=detail)
        assert weights is not None
        checked = time.perf_counter()
        replace_weights(self._model, weights, self._ranks)
        self._synchronize()
        copied = time.perf_counter()
        self._runner.labels.forget()
        if not order.keep_rows:
            # It uses rows and pages of its own, so it is left out where they must stay.
            check_runner(self._model, self._runner, self._dtype, own=self._layers)
        log.info(
            "weights %r from %s: checked in %.3f s, copied in %.3f s, self-check in %.3f s",
            *(order.version, order.folder, checked - begun, copied - checked, time.perf_counter() - copied),
        )
        return pb.WeightsLoaded(version=order.version, ok=True)

    def _checked(self, order: pb.LoadWeights, opened: ExitStack) -> tuple[NewWeights | None, str]:
        """The weights, whose files `opened` closes; or None and why they are refused."""
        view = ""
        try:
            folder = opened.enter_context(opened_weights(order.folder, order.roots))
            view = str(folder)
            files = read_described(folder, self._files)
            self._check_config(files.config)
            check_described(self._files, files)
            weights = read_weights(files, self._dtype)
            check_targets(self._model, weights, self._ranks)
        except Exception as error:  # also any error of Transformers, which a start would end with
            is_plain = isinstance(error, (ValueError, OSError, MemoryError, RuntimeError))
            why = first_line(error) if is_plain else f"{type(error).__name__}: {first_line(error)}"
            return None, why.replace(view, order.folder) if view else why
        return weights, ""

    def _synchronize(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
