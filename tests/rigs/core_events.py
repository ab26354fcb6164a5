"""Events of front ends and workers in which a caller names the fields that matter to it, and the others are plain."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights
from scheduler_svc.core.messages.plan import Plan

WEIGHTS_ROOT = "/weights"
_PLAIN: dict[str, Any] = {
    "frontend": "f-1",
    "sampling": b"",
    "max_new_tokens": 4,
    "min_new_tokens": 0,
    "stop_token_ids": (),
    "ignore_eos": True,
    "priority": 0,
    "max_time_seconds": 0.0,
    "deadline_seconds": 0.0,
}


def submit(stream: int, prompt: Sequence[int] | Int32Array, **fields: Any) -> ev.Submit:
    """Returns a request that is named after its stream, without options but these."""
    plain = {**_PLAIN, "request_id": f"r{stream}"}
    return ev.Submit(stream=stream, prompt=np.asarray(prompt, np.int32), **(plain | fields))


def update_weights(number: int, running: Running, **fields: Any) -> UpdateWeights:
    """Returns an operator's wish, in query `number`, that all workers load version "v<number>"."""
    weights = Weights(version=f"v{number}", folder=f"{WEIGHTS_ROOT}/v{number}")
    return UpdateWeights(query=number, weights=weights, running=running, **({"frontend": _PLAIN["frontend"]} | fields))


def num_sampled(plan: Plan) -> int:
    """Returns how many tokens the plan samples."""
    return int(plan.chunk_samples.sum()) + len(plan.decode_rows)


def step_done(worker: str, plan: Plan, tokens: Int32Array | None = None, **fields: Any) -> ev.StepDone:
    """Returns the plan's good result with these tokens; without them (None) each is 5."""
    if tokens is None:
        tokens = np.full(num_sampled(plan), 5, np.int32)
    good: dict[str, Any] = {"step": plan.step, "status": ev.StepStatus.OK, "detail": "", "compute_us": 1}
    return ev.StepDone(
        worker=worker, generation=plan.generation, tokens=tokens, **({"nonfinite": NO_IDS} | good | fields)
    )
