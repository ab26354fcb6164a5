"""The benchmark of flex-nano-vllm's author: Gemma-2-2b, 512 requests, KV cache up to 50 % and 90 % of memory.

Its figures are from a card with 24 GB, so the pool has the tokens that it had there (its benchmark.py names them);
the published figures are another card's and stand beside only to name the source of the workload.
"""

from tests.measure.gpu_day import published, workloads
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import TINY_SIZES
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.runners import checkpoint
from tests.measure.gpu_day.service import Service

# Tokens of the pool at each share of 24 GB.
_POOL_TOKENS = {50: 45_360, 90: 140_432}
_PAGE_SIZE = 128
_LEAST_SECONDS_LEFT = 100.0


def run(day: Day) -> None:
    """Each pool has a worker of its own, after another."""
    requests = workloads.tiny() if day.tiny else workloads.flex_nano_vllm()
    folder = checkpoint(day, "Gemma-2-2b")
    for share, num_tokens in _POOL_TOKENS.items():
        sizes = {"max_rows": 256, "max_length": 1024, "token_budget": 4096, "num_pages": num_tokens // _PAGE_SIZE + 1}
        if day.seconds_left() < _LEAST_SECONDS_LEFT:
            day.record.note(f"the pool of {share} % was left out: the time was over")
            continue
        with Service(
            day, str(folder), num_frontends=1 if day.tiny else 2, **(TINY_SIZES if day.tiny else sizes)
        ) as service:
            with day.phase(f"{share} %: start of a worker"):
                worker = service.start_worker()
            with day.phase(f"{share} %: run"):
                one = service.run(requests, worker, num_processes=1 if day.tiny else 2)
        lengths = [len(tokens) for tokens in one.completions.tokens]
        day.record.check(f"{share} %: every request has its tokens", lengths == requests.output_lengths)
        rate = requests.num_output_tokens / one.completions.seconds
        note = f"a pool of {num_tokens:,} tokens" if not day.tiny else ""
        day.record.figure(f"{share} %: whole service", rate, "output tokens/s", note=note)
        total = (requests.num_output_tokens + requests.num_prompt_tokens) / one.completions.seconds
        day.record.figure(f"{share} %: with prompts", total, "tokens/s")
        day.record.figure(f"{share} %: preemptions", one.preemptions, "")
        if not day.tiny:
            day.record.figure(
                f"{share} %: flex-nano-vllm",
                published.FLEX_NANO_VLLM_TOKENS_PER_SECOND[share],
                "output tokens/s",
                Kind.PUBLISHED,
                note=published.FLEX_NANO_VLLM_NOTE,
            )
