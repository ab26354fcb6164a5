"""Decides whether a worker may serve with the others: same model, same attention pattern, large enough frames.

The functions are pure.
"""

from collections.abc import Iterable

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.schedule.plan_size import largest_plan_bytes


def plan_bytes(config: CoreConfig, info: WorkerInfo) -> int:
    """Returns the largest encoded size of the rows that one plan starts. Half a frame is reserved for the rest."""
    return min(config.max_plan_bytes, info.max_frame_bytes // 2)


def frame_refusal(config: CoreConfig, info: WorkerInfo) -> str:
    """Returns why a plan could exceed the worker's frames, or an empty string if none can."""
    needed = largest_plan_bytes(info, plan_bytes(config, info))
    if needed <= info.max_frame_bytes:
        return ""
    return (
        f"max_length is {info.max_length} and num_pages {info.num_pages}: a plan may then take {needed} bytes, "
        f"but the worker accepts frames of at most {info.max_frame_bytes}; choose a smaller max_length"
    )


def model_refusal(info: WorkerInfo, served: WorkerInfo | None, others: Iterable[WorkerInfo]) -> str:
    """Returns why the worker would answer requests differently from the others, or an empty string."""
    if served is None:
        return ""
    if info.identity != served.identity:
        what = "weights, config or tokenizer differ"
        if served.page_size != info.page_size:
            what = f"pages of {info.page_size} tokens instead of {served.page_size}"
        return (
            f"this service serves {served.model} (identity {served.identity[:12]}); the worker has "
            f"{info.model} (identity {info.identity[:12]}): {what}; start the worker with the same model, or restart "
            "the scheduler"
        )
    for other in others:
        if (info.window, info.sink_tokens) != (other.window, other.sink_tokens):
            return (
                f"the serving workers attend to {_pattern(other)}; this worker attends to {_pattern(info)}, so it "
                "would answer the same request differently; start it with the same window, or restart the scheduler"
            )
    return ""


def _pattern(info: WorkerInfo) -> str:
    if not info.window:
        return "all earlier tokens"
    return f"the last {info.window} and the first {info.sink_tokens} tokens"


def refused_for_good(worker: str, reason: str) -> list[fx.Effect]:
    """Returns the effects that refuse a worker which may not join again."""
    note = fx.Note(message=f"worker {worker} refused: {reason}")
    return [note, fx.WorkerRefused(worker=worker, reason=reason, retry=False)]
