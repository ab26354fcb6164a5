"""Owns the sum of a request's samples: the core's usage and timing of each, adjusted for stop strings.

The prompt counts once; other tokens and preemptions add up. Times up to the first token are those of the sample with
the earliest first token; the time of the last token and the total are those of the sample that ended last.
"""

from collections.abc import Sequence

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.effects import MAX_COUNT


def summarize(
    ends: Sequence[frontend_pb2.End], num_tokens: Sequence[int], *, prompt_tokens: int, reasoning_tokens: int = 0
) -> pb.Summary:
    """The summary of samples that ended with `ends` and delivered `num_tokens` tokens each."""
    num_sampled = [end.usage.output_tokens + end.usage.discarded_tokens for end in ends]
    usage = pb.Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=sum(num_tokens),
        discarded_tokens=sum(max(0, sampled - sent) for sampled, sent in zip(num_sampled, num_tokens, strict=True)),
        recomputed_tokens=min(sum(end.usage.recomputed_tokens for end in ends), MAX_COUNT),
        # The prompt counts once: the other samples find the pages that the first one computed.
        cached_prompt_tokens=ends[0].usage.cached_prompt_tokens,
        reasoning_tokens=reasoning_tokens,
    )
    timings = [end.timing for end in ends]
    with_tokens = [timing for timing, count in zip(timings, num_sampled, strict=True) if count]
    first = min(with_tokens or timings, key=lambda timing: timing.first_token_seconds)
    last_token_seconds = max(timing.first_token_seconds + timing.decode_seconds for timing in timings)
    timing = pb.Timing(
        queue_seconds=first.queue_seconds,
        prefill_seconds=first.prefill_seconds,
        first_token_seconds=first.first_token_seconds,
        decode_seconds=last_token_seconds - first.first_token_seconds,
        total_seconds=max(timing.total_seconds for timing in timings),
        preemptions=min(sum(timing.preemptions for timing in timings), MAX_COUNT),
        worker_changes=max(timing.worker_changes for timing in timings),
    )
    spans = [
        pb.WeightsSpan(from_token=span.from_token, version=span.version, sample_idx=sample_idx)
        for sample_idx, end in enumerate(ends)
        for span in end.weights
    ]
    return pb.Summary(usage=usage, timing=timing, weights=spans)
