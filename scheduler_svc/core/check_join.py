"""Decides whether a worker may serve beside the others: same model, same attention pattern, frames of sufficient size.

Pure functions; owns nothing.
"""

from collections.abc import Iterable

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.schedule.plan_size import largest_plan_bytes


def plan_bytes(config: CoreConfig, info: WorkerInfo) -> int:
    """Encoded size up to which a plan for the worker starts rows. Half of a small frame is left for the rest of it."""
    return min(config.max_plan_bytes, info.max_frame_bytes // 2)


def frame_refusal(config: CoreConfig, info: WorkerInfo) -> str:
    """Why a plan could exceed the worker's frames; empty if none can."""
    needed = largest_plan_bytes(info, plan_bytes(config, info))
    if needed <= info.max_frame_bytes:
        return ""
    return (
        f"max_length is {info.max_length} and num_pages {info.num_pages}: a plan for them may have {needed} bytes; "
        f"the worker takes frames of {info.max_frame_bytes}; choose a smaller max_length"
    )


def model_refusal(info: WorkerInfo, served: WorkerInfo | None, others: Iterable[WorkerInfo]) -> str:
    """Why the worker would answer requests differently from the `served` model or the other workers; empty if not."""
    if served is None:
        return ""
    if info.identity != served.identity:
        what = "weights, config or tokenizer differ"
        if served.page_size != info.page_size:
            what = f"pages of {info.page_size} tokens instead of {served.page_size}"
        return (
            f"this service serves {served.model} (identity {served.identity[:12]}); the worker brings "
            f"{info.model} (identity {info.identity[:12]}): {what}; bring the same, or restart the scheduler"
        )
    for other in others:
        if (info.window, info.sink_tokens) != (other.window, other.sink_tokens):
            return (
                f"the workers that serve see {_pattern(other)}; this one sees {_pattern(info)}, so the same request "
                "would be answered differently; bring the same, or restart the scheduler"
            )
    return ""


def _pattern(info: WorkerInfo) -> str:
    if not info.window:
        return "the whole past"
    return f"{info.window} tokens back and the first {info.sink_tokens}"
