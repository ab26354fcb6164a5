"""The claims of the core's policies, each with the workloads on which it must hold and the variants that it must beat.

Owns what is compared. Lengths are heavy-tailed: lognormal of sigma 1, so that one in a hundred is seven times the mean.
"""

from collections.abc import Sequence
from functools import partial

from tests.measure.policies.rivals import Placement, placed
from tests.measure.policies.scenario import Experiment, Judged, Scenario, Variant

# Prompts of 512 tokens and answers of 256. Callers limit answers to 2,048.
_ROWS = 128
_CHAT = "--input lognormal:512:1.0:8192 --output lognormal:256:1.0:2048 --max-new-tokens 2048"
# Short prompts, long answers.
_LONG_ANSWERS = "--input lognormal:128:1.0:2048 --output lognormal:512:0.8:2048 --max-new-tokens 2048"


_COSTS = ("ttft", "itl", "total")


def at(figures: Sequence[str], *scenarios: Scenario) -> tuple[Judged, ...]:
    """Judges each of the figures at each of the scenarios."""
    return tuple(
        Judged(scenario=each.name, figure=figure, is_cost=any(cost in figure for cost in _COSTS))
        for figure in figures
        for each in scenarios
    )


def tight(percent: int, lengths: str = _CHAT, page_size: int = 16) -> Scenario:
    """Returns a scenario with more callers than rows, and memory for `percent` of what all rows need at their end."""
    kind, mean = ("chat", 768) if lengths is _CHAT else ("long answers", 640)
    pages = _ROWS * mean * percent // 100 // page_size
    paged = "" if page_size == 16 else f", pages of {page_size}"
    return Scenario(
        name=f"{kind}, {percent} %{paged}",
        words=f"{kind}: {2 * _ROWS} callers at once, {_ROWS} rows, memory for {percent} % of what these need",
        flags=f"{lengths} --page-size {page_size} --concurrency {2 * _ROWS} --max-rows {_ROWS} --num-pages {pages + 1}",
        requests=1_000,
    )


_STEADY = Scenario(
    name="chat, steady",
    words="chat at four fifths of the machine's capacity",
    flags=f"{_CHAT} --page-size 16 --rate 23 --max-rows 256",
    requests=3_000,
)
_BURSTY = Scenario(
    name="chat, bursty",
    words="the same in bursts",
    flags=f"{_CHAT} --page-size 16 --rate 20 --arrivals bursty --burstiness 3 --max-rows 256",
    requests=3_000,
)
_MOONCAKE = Scenario(
    name="Mooncake-like",
    words="conversations with prompts of 8,600 tokens that repeat the turns before",
    flags="--page-size 128 --max-rows 128 --token-budget 4096",
    requests=1_500,
    trace_requests=1_500,
    trace_seconds=650.0,
)
_TIGHT = (
    *(tight(percent, _LONG_ANSWERS) for percent in (10, 30, 60)),
    tight(30, _LONG_ANSWERS, page_size=128),
    *(tight(percent) for percent in (10, 30)),
)
_JUST = Scenario(
    name="long answers, at a rate",
    words="long answers at a rate that just fits, memory for 30 % of what 128 rows need",
    flags=f"{_LONG_ANSWERS} --page-size 16 --rate 9 --max-rows {_ROWS} --num-pages {_ROWS * 640 * 30 // 100 // 16 + 1}",
    requests=1_500,
)

MIXED = Experiment(
    name="mixed",
    claim="prompts and decodes in one step beat prompts first and alone",
    scenarios=(_STEADY, _BURSTY, _MOONCAKE),
    variants=(Variant(name="mixed"), Variant(name="prefill first", flags="--no-mixed-steps")),
    judged=at(("itl_p99", "total_mean"), _STEADY, _BURSTY, _MOONCAKE),
    figures=("total_mean",),
)
ADMISSION = Experiment(
    name="admission",
    claim="an estimate of the pages to leave free beats a watermark, and leaving none",
    scenarios=(*_TIGHT, _JUST),
    variants=(
        Variant(name="horizon"),
        Variant(name="watermark 1 %", flags="--admission watermark", constants={"WATERMARK": 0.01}),
        Variant(name="watermark 3 %", flags="--admission watermark", constants={"WATERMARK": 0.03}),
        Variant(name="known", flags="--admission known"),
    ),
    judged=(*at(("tokens_per_second", "itl_p99"), *_TIGHT), *at(("ttft_p99", "itl_p99"), _JUST)),
)

_KINDS = (
    "--input lognormal:128:1.0:2048 --output lognormal:64:1.0:512 --max-new-tokens 512 --page-size 64 "
    "--prefix-groups 40 --prefix-tokens 2048 --num-pages 1000 --max-rows 32"
)
_GROUPS = Scenario(
    name="prompts of 40 kinds",
    words="40 prefixes of 2,048 tokens, memory for 16 of them beside the running requests, more callers than rows",
    flags=f"{_KINDS} --concurrency 96",
    requests=2_000,
)
_GROUPS_AT_A_RATE = Scenario(
    name="40 kinds, at a rate",
    words="the same at a rate that first come, first served cannot hold",
    flags=f"{_KINDS} --rate 28 --max-waiting 10000 --max-waiting-tokens 100000000",
    requests=2_500,
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
    claim="admitting the request with most of its prompt cached beats first come, first served",
    scenarios=(_GROUPS, _GROUPS_AT_A_RATE, _CROWDED_MOONCAKE),
    variants=(Variant(name="cache-aware"), Variant(name="FCFS", flags="--no-cache-aware")),
    judged=(
        *at(("requests_per_second",), _GROUPS, _CROWDED_MOONCAKE),
        *at(("ttft_p99",), _GROUPS_AT_A_RATE),
    ),
)
_GREEDY = Scenario(
    name="one greedy tenant",
    words="8 tenants, one sends 80 % of all requests, in all twice the machine's capacity",
    flags=f"{_CHAT} --page-size 16 --rate 36 --max-rows 64 --tenants 8 --greedy-share 0.8 --max-waiting 100000 "
    "--max-waiting-tokens 1000000000",
    requests=4_000,
)
FAIR = Experiment(
    name="fair",
    claim="equal shares for all tenants, against one queue",
    scenarios=(_GREEDY,),
    variants=(Variant(name="fair share"), Variant(name="FCFS", flags="--no-fair-share")),
    judged=at(("small_ttft_p99", "small_served", "jain"), _GREEDY),
    figures=("small_ttft_p50", "small_ttft_p99", "greedy_ttft_p99", "small_served", "jain"),
)
SAVING = Experiment(
    name="saving",
    claim="swapping a preempted request's pages to host memory, against recomputing them",
    scenarios=(tight(30, _LONG_ANSWERS), tight(10, _LONG_ANSWERS)),
    variants=(
        Variant(name="saved", flags="--host-pages 20000"),
        Variant(name="recomputed"),
        Variant(name="saved, watermark", flags="--host-pages 20000 --admission watermark"),
        Variant(name="recomputed, watermark", flags="--admission watermark"),
    ),
    judged=at(("tokens_per_second", "itl_p99"), tight(30, _LONG_ANSWERS), tight(10, _LONG_ANSWERS)),
)
_FOUR = Scenario(
    name="four workers",
    words="64 prefixes of 2,048 tokens, each worker has room for 20 beside the running requests",
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


ROUTING = Experiment(
    name="routing",
    claim="routing by prefix and load, against round robin, random and the first free worker",
    scenarios=(_FOUR, _FOUR_MOONCAKE),
    variants=(
        Variant(name="routed"),
        *(Variant(name=str(each), change=partial(placed, each)) for each in Placement),
    ),
    judged=at(("ttft_p50", "ttft_p99"), _FOUR, _FOUR_MOONCAKE),
)

EXPERIMENTS = {each.name: each for each in (MIXED, ADMISSION, CACHE, FAIR, SAVING, ROUTING)}
