"""A submitted plan and its outcome, when its step has ended or its device is lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.sampling.logprobs import LogprobTensors
from gpu_worker.step.output import StepOutput
from gpu_worker.wire.frames import NO_TOKENS, Outcome, TokenLogprobs


class DeviceLost(RuntimeError):
    """The device's context is unusable; only a new process can use the device again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A submitted plan. `output` is None if the plan was refused or computes nothing."""

    outcome: Outcome
    output: StepOutput | None = None
    num_samples: int = 0
    started: "torch.cuda.Event | None" = None
    ended: "torch.cuda.Event | None" = None
    # To be called when the step has ended well.
    on_end: Callable[[], None] | None = None

    def with_pool(self, pool_id: bytes) -> "InFlight":
        """The same plan, whose outcome tells which pool the worker uses."""
        return replace(self, outcome=replace(self.outcome, pool_id=pool_id))

    def finished(self) -> Outcome:
        """Waits for the end of the step and returns its outcome. Passes on errors of the device."""
        compute_us = self.outcome.compute_us
        if self.started is not None and self.ended is not None:
            self.ended.synchronize()
            compute_us = int(self.started.elapsed_time(self.ended) * 1e3)
        if self.on_end is not None:
            self.on_end()
        if self.output is None:
            return replace(self.outcome, compute_us=compute_us)
        tokens = self.output.tokens.numpy()[: self.num_samples]
        nonfinite = NO_TOKENS
        if tokens.size and tokens[tokens.argmin()] < 0:
            nonfinite = np.flatnonzero(tokens < 0).astype(np.int32)
            tokens = np.maximum(tokens, 0)
        return Outcome(
            generation=self.outcome.generation,
            step=self.outcome.step,
            status=self.outcome.status,
            tokens=tokens.astype(np.int32),
            nonfinite=nonfinite,
            compute_us=compute_us,
            logprobs=_token_logprobs(self.output.logprobs),
            prompt_logprobs=_token_logprobs(self.output.prompt_logprobs),
            pool_id=self.outcome.pool_id,
        )


def on_lost_device(outcomes: Sequence[Outcome], detail: str) -> list[Outcome]:
    """Returns the outcomes of plans in flight on a device that is lost; `detail` says why.

    The first plan of each generation has failed, and later ones are skipped.
    """
    failed: set[int] = set()
    lost: list[Outcome] = []
    for outcome in outcomes:
        is_first = outcome.generation not in failed
        failed.add(outcome.generation)
        status, why = (pb.STEP_STATUS_FAILED, detail) if is_first else (pb.STEP_STATUS_SKIPPED, "")
        lost.append(replace(outcome, status=status, detail=why))
    return lost


def _token_logprobs(tensors: LogprobTensors | None) -> TokenLogprobs | None:
    """Copies the logprobs, because a later step overwrites a GPU's results."""
    if tensors is None:
        return None
    return TokenLogprobs(
        logprobs=tensors.logprobs.numpy().copy(),
        top_token_ids=tensors.top_token_ids.numpy().copy(),
        top_logprobs=tensors.top_logprobs.numpy().copy(),
    )
