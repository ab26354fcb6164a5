"""The claims of the core's policies, each with the workloads that it is to hold on and the variants that it is to beat.

Owns what is compared. Lengths are heavy-tailed: lognormal of sigma 1, so that one in a hundred is seven times the mean.
"""

from contextlib import AbstractContextManager
from functools import partial

from tests.benchmarks.policies.placement import Placement, placed
from tests.benchmarks.policies.scenario import Experiment, Judged, Scenario, Variant

# Prompts of 512 tokens and answers of 256, which callers limit to 2,048.
_CHAT = "--input lognormal:512:1.0:8192 --output lognormal:256:1.0:2048 --max-new-tokens 2048 --page-size 16"
# Little is asked, much is answered.
_LONG_ANSWERS = "--input lognormal:128:1.0:2048 --output lognormal:512:0.8:2048 --max-new-tokens 2048 --page-size 16"


def tight(percent: int, lengths: str = _CHAT, rows: int = 128, mean: int = 768, extra: str = "") -> Scenario:
    """More callers than rows, and memory for so many percent of what all rows would take by their end."""
    pages = rows * mean * percent // 100 // 16
    kind = "chat" if lengths is _CHAT else "long answers"
    return Scenario(
        name=f"{kind}, {percent} %",
        words=f"{kind}: {2 * rows} callers at once, {rows} rows, memory for {percent} % of what these want",
        flags=f"{lengths} --concurrency {2 * rows} --max-rows {rows} --num-pages {pages + 1} {extra}",
        requests=2_000,
    )


_STEADY = Scenario(
    name="chat, steady",
    words="chat at four fifths of what the machine can do",
    flags=f"{_CHAT} --rate 23 --max-rows 256",
    requests=3_000,
)
_BURSTY = Scenario(
    name="chat, bursty",
    words="the same, in bursts",
    flags=f"{_CHAT} --rate 20 --arrivals bursty --burstiness 3 --max-rows 256",
    requests=3_000,
)
_MOONCAKE = Scenario(
    name="Mooncake-like",
    words="conversations of 8,600-token prompts that repeat their turns before",
    flags="--page-size 128 --max-rows 128 --token-budget 4096",
    requests=1_500,
    trace_requests=1_500,
    trace_seconds=460.0,
)
_ADMISSION = (*(tight(percent) for percent in (10, 30, 60)), *(tight(p, _LONG_ANSWERS, mean=640) for p in (10, 30, 60)))

MIXED = Experiment(
    name="mixed",
    claim="prompts and decodes in one step beat prompts first and alone",
    scenarios=(_STEADY, _BURSTY, _MOONCAKE),
    variants=(Variant(name="mixed"), Variant(name="prefill first", flags="--no-mixed-steps")),
    judged=tuple(Judged(scenario=each.name, figure="itl_p99", is_cost=True) for each in (_STEADY, _BURSTY, _MOONCAKE)),
)
ADMISSION = Experiment(
    name="admission",
    claim="what stays free by an estimate beats a watermark, and nothing",
    scenarios=_ADMISSION,
    variants=(
        Variant(name="horizon"),
        Variant(name="watermark", flags="--admission watermark"),
        Variant(name="known", flags="--admission known"),
    ),
    judged=tuple(Judged(scenario=each.name, figure="tokens_per_second", is_cost=False) for each in _ADMISSION),
)

_GROUPS = Scenario(
    name="prompts of 40 kinds",
    words="40 prefixes of 2,048 tokens, memory for 16 of them beside what runs, more callers than rows",
    flags="--input lognormal:128:1.0:2048 --output lognormal:64:1.0:512 --max-new-tokens 512 --page-size 64 "
    "--prefix-groups 40 --prefix-tokens 2048 --num-pages 1000 --max-rows 32 --concurrency 96",
    requests=2_000,
)
_CROWDED_MOONCAKE = Scenario(
    name="Mooncake-like, crowded",
    words="the trace at twice the rate, memory for a few dozen of its prompts",
    flags="--page-size 128 --max-rows 64 --num-pages 3000 --max-waiting 20000 --max-waiting-tokens 1000000000",
    requests=1_500,
    trace_requests=1_500,
    trace_seconds=150.0,
)
CACHE = Experiment(
    name="cache",
    claim="who finds most of its prompt kept goes first, against first come, first served",
    scenarios=(_GROUPS, _CROWDED_MOONCAKE),
    variants=(Variant(name="cache-aware"), Variant(name="FCFS", flags="--no-cache-aware")),
    judged=tuple(
        Judged(scenario=each.name, figure="requests_per_second", is_cost=False) for each in (_GROUPS, _CROWDED_MOONCAKE)
    ),
)
_GREEDY = Scenario(
    name="one greedy tenant",
    words="8 tenants, one sends 80 % of all requests, all together a third more than the machine can do",
    flags=f"{_CHAT} --rate 24 --max-rows 64 --tenants 8 --greedy-share 0.8 --max-waiting 100000 "
    "--max-waiting-tokens 1000000000",
    requests=4_000,
)
FAIR = Experiment(
    name="fair",
    claim="tenants share the service alike, against one queue of all",
    scenarios=(_GREEDY,),
    variants=(Variant(name="fair share"), Variant(name="FCFS", flags="--no-fair-share")),
    judged=(
        Judged(scenario=_GREEDY.name, figure="small_ttft_p99", is_cost=True),
        Judged(scenario=_GREEDY.name, figure="jain", is_cost=False),
    ),
    figures=("small_ttft_p50", "small_ttft_p99", "greedy_ttft_p99", "jain"),
)
_SAVING = (
    tight(30, _LONG_ANSWERS, mean=640, extra="--admission known"),
    tight(10, extra="--admission known"),
)
SAVING = Experiment(
    name="saving",
    claim="a preempted request's pages saved to host memory, against computing them again",
    scenarios=_SAVING,
    variants=(Variant(name="saved", flags="--host-pages 20000"), Variant(name="recomputed")),
    judged=tuple(Judged(scenario=each.name, figure="tokens_per_second", is_cost=False) for each in _SAVING),
)
_FOUR = Scenario(
    name="four workers",
    words="64 prefixes of 2,048 tokens, each worker has room for 20 beside what runs",
    flags="--input lognormal:128:1.0:2048 --output lognormal:64:1.0:512 --max-new-tokens 512 --page-size 64 "
    "--prefix-groups 64 --prefix-tokens 2048 --num-pages 1000 --max-rows 32 --workers 4 --rate 150",
    requests=4_000,
)
_FOUR_MOONCAKE = Scenario(
    name="Mooncake-like, four workers",
    words="the trace at four times one worker's rate",
    flags="--page-size 128 --max-rows 64 --workers 4 --num-pages 3500",
    requests=2_000,
    trace_requests=2_000,
    trace_seconds=155.0,
)


def _placed(placement: Placement) -> AbstractContextManager[None]:
    return placed(placement)


ROUTING = Experiment(
    name="routing",
    claim="where prefix and load are best, against each worker in turn, at random, and whoever is free",
    scenarios=(_FOUR, _FOUR_MOONCAKE),
    variants=(
        Variant(name="routed"),
        *(Variant(name=str(each), change=partial(_placed, each)) for each in Placement),
    ),
    judged=tuple(Judged(scenario=each.name, figure="ttft_p99", is_cost=True) for each in (_FOUR, _FOUR_MOONCAKE)),
)

EXPERIMENTS = {each.name: each for each in (MIXED, ADMISSION, CACHE, FAIR, SAVING, ROUTING)}
