"""The core's constants, each with the workloads that depend on it and with other values to try.

Owns the choice of both. A sweep is an experiment with the core's value as its first variant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.queue import turns
from scheduler_svc.core.schedule import placement as routing
from scheduler_svc.core.schedule import policy
from scheduler_svc.core.state import lane_schedule
from tests.measure.policies.experiments import ADMISSION, CACHE, FAIR, MIXED, ROUTING, at
from tests.measure.policies.rivals import small_tenants_first
from tests.measure.policies.scenario import Change, Experiment, Scenario, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """`standing` is the core's value. `flags` and `change` apply to all variants."""

    standing: float
    values: Sequence[float]
    scenarios: Sequence[Scenario]
    figure: str
    flags: str = ""
    change: Change | None = None
    figures: tuple[str, ...] = ()


_ALIKE = Scenario(
    name="all of one length",
    words="prompts and answers of 256 tokens, known ahead, memory for 30 % of what 128 rows need",
    flags="--input 256 --output 256 --max-new-tokens 0 --page-size 128 --max-rows 128 --concurrency 256 "
    "--num-pages 154",
    requests=1_000,
)


def _of_admission(standing: float, values: Sequence[float], flags: str = "") -> Sweep:
    return Sweep(
        standing=standing,
        values=values,
        scenarios=ADMISSION.scenarios[:-1],
        figure="tokens_per_second",
        flags=flags,
    )


SWEEPS = {
    "FIRST_SHARE": _of_admission(lane_schedule.FIRST_SHARE, (0.05, 0.1, 0.7)),
    "SHARE_DECAY": _of_admission(lane_schedule.SHARE_DECAY, (0.99, 0.995, 0.999)),
    "SHARE_RAISE": _of_admission(lane_schedule.SHARE_RAISE, (0.001, 0.002, 0.01, 0.02, 0.1)),
    "NEAR_STEPS": Sweep(
        standing=policy.NEAR_STEPS,
        values=(1, 8, 32, 128),
        scenarios=(*ADMISSION.scenarios[:-1], _ALIKE),
        figure="tokens_per_second",
    ),
    "WATERMARK": _of_admission(policy.WATERMARK, (0.005, 0.02, 0.03, 0.05, 0.1), "--admission watermark"),
    "ENDING_SECONDS": Sweep(
        standing=policy.ENDING_SECONDS,
        # The last one: chunks of others always join.
        values=(0.01, 0.02, 0.1, 1e6),
        scenarios=MIXED.scenarios,
        figure="itl_p99",
        figures=MIXED.figures,
    ),
    "WINDOW": Sweep(
        standing=turns.WINDOW,
        values=(8, 16, 64, 128),
        scenarios=CACHE.scenarios,
        figure="requests_per_second",
    ),
    "MAX_PASSED_OVER": Sweep(
        standing=policy.MAX_PASSED_OVER,
        values=(0, 4, 8, 16, 64, 128, 1024),
        scenarios=CACHE.scenarios,
        figure="requests_per_second",
    ),
    "AGEING_TOKENS": Sweep(
        standing=turns.AGEING_TOKENS,
        values=(0, 1024, 16_384, 262_144, 1_048_576),
        scenarios=FAIR.scenarios,
        figure="small_ttft_p99",
        flags="--no-fair-share",
        change=small_tenants_first,
        figures=FAIR.figures,
    ),
    "ROW_TOKENS": Sweep(
        standing=routing.ROW_TOKENS,
        values=(0, 8, 16, 64, 128, 256, 1024),
        scenarios=ROUTING.scenarios,
        figure="ttft_p99",
    ),
}


def sweep(name: str) -> Experiment:
    """Returns the experiment of the core's value against each other one."""
    found = SWEEPS[name]
    change = {} if found.change is None else {"change": found.change}
    return Experiment(
        name=name,
        claim=f"the core's value {found.standing:g} against others",
        scenarios=tuple(found.scenarios),
        variants=tuple(
            Variant(name=f"{value:g}", flags=found.flags, constants={name: value}, **change)
            for value in (found.standing, *found.values)
        ),
        judged=at((found.figure,), *found.scenarios),
        figures=found.figures,
    )
