"""The line of figures after an answer."""

from tandem_client.async_client import AsyncGenerateStream
from tandem_client.plural import counted
from tandem_client.sync_client import GenerateStream
from tandem_client.types import Summary


def closing_line(stream: GenerateStream | AsyncGenerateStream, first_seconds: float, decode_seconds: float) -> str:
    """Returns tokens, reasons and rates, and what the summary tells of cache, preemptions and workers.

    `first_seconds`: the time to the first token as the caller saw it; `decode_seconds`: from there to the last.
    """
    ends = [sample.finished for sample in stream.samples if sample.finished is not None]
    num_tokens = sum(end.output_tokens for end in ends)
    rate = (num_tokens - 1) / decode_seconds if num_tokens > 1 and decode_seconds > 0 else 0.0
    reasons = ", ".join(dict.fromkeys(end.reason for end in ends))
    line = f"{counted(num_tokens, 'token')}, ended by {reasons}"
    parts = [f"{line}; first after {first_seconds:.3f} s, then {rate:.1f} tokens/s"]
    return "; ".join([*parts, *(_events(stream.summary) if stream.summary is not None else ())])


def _events(summary: Summary) -> list[str]:
    usage, timing = summary.usage, summary.timing
    found: list[str] = []
    if usage.reasoning_tokens:
        found.append(f"{counted(usage.reasoning_tokens, 'token')} of reasoning")
    if usage.cached_prompt_tokens:
        found.append(f"{usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if timing.preemptions:
        found.append(counted(timing.preemptions, "preemption"))
    if timing.worker_changes:
        found.append(counted(timing.worker_changes, "worker change"))
    return found
